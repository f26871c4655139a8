"""What a run is given to work on: its prompts, tokenised, and the reward that fits their columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ppo.batch import Prompt
from lightning_ppo.errors import DataError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.validation import require

Rows = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class DataSets:
    """Prompts for training and validation, with what they and the tokenizer settle."""

    train: PromptSet
    validation: PromptSet | None
    reward: RewardFunction
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    max_context_tokens: int
    """Longest prompt of both sets plus the longest response: what an engine must have room for, and no more."""
    longest_prompt: int
    """Tokens of the longest prompt of both sets."""

    @classmethod
    def load(
        cls,
        prompts: Rows,
        validation_prompts: Rows | None,
        reward: str | Callable[..., Any],
        config: RolloutConfig,
        *,
        tokenizer: Any,
        policy_context: int,
        vocabulary: int,
    ) -> "DataSets":
        """Load and check all prompts, the reward's signature, and the tokens that end a response.

        Args:
            prompts: Whatever `load_rows` takes.
            validation_prompts: The same for validation and prediction; None without.
            reward: A callable or its import path.
            config: Settings.
            tokenizer: The policy's tokenizer.
            policy_context: Most tokens that the policy can read.
            vocabulary: The policy's vocabulary size.

        Raises:
            DataError: a row cannot be used.
            ConfigError: the reward asks for a column that is not there, or the policy lacks a token of the tokenizer or
                of `stop_token_ids`.
        """
        size, why = len(tokenizer), f"is more tokens than the policy's {vocabulary}"
        require(size <= vocabulary, "tokenizer", size, why, "use the policy's own")
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        stops = ends if config.stop_token_ids is None else tuple(config.stop_token_ids)
        unknown = [token for token in stops if token >= vocabulary]
        why = f"has {unknown}, which the policy's vocabulary lacks"
        require(not unknown, "stop_token_ids", stops, why, f"set tokens from 0 to {vocabulary - 1}")
        room = policy_context - config.max_response_tokens
        train = PromptSet(prompts, tokenizer, room, "prompts")
        timeout_s = config.reward_timeout_s
        function, validation = RewardFunction(reward, train.columns, timeout_s), None
        if validation_prompts is not None:
            validation = PromptSet(validation_prompts, tokenizer, room, "validation_prompts")
            RewardFunction(reward, validation.columns, timeout_s)
        longest = max(prompt_set.longest for prompt_set in (train, validation) if prompt_set is not None)
        return cls(train, validation, function, stops, longest + config.max_response_tokens, longest)

    def check_fit(self, prompts: Sequence[Prompt]) -> None:
        """Check that an engine that was started for these data sets has room for other prompts.

        Raises:
            DataError: a prompt is longer than every one of them.
        """
        for prompt in prompts:
            if len(prompt.token_ids) > self.longest_prompt:
                raise DataError(
                    f"the prompt of row {prompt.row} has {len(prompt.token_ids)} tokens, the engine has room for the "
                    f"{self.longest_prompt} of the longest in prompts and validation_prompts; add one as long there"
                )
