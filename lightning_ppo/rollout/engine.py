"""What a generation engine is: token ids in; token ids, log-probs, finish reason and versions out."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lightning_ppo.batch import FinishReason
from lightning_ppo.errors import EngineError

EngineName = Literal["local", "vllm"]
"""The engines that there are."""


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the most likely token, with the log-prob it has at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the filter off."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One response to be sampled."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """The only source of randomness of this response; 0 <= seed < 2**63."""


@dataclass(frozen=True)
class Generation:
    """One sampled response."""

    request_id: str
    token_ids: tuple[int, ...]
    """The stop token is included."""
    logprobs: tuple[float, ...]
    """float32 values: log-prob of each token under the (tempered, filtered, renormalised) distribution it came from."""
    finish_reason: FinishReason
    policy_versions: tuple[int, ...]
    """Policy version each token was sampled with."""


@dataclass(frozen=True)
class PolicySpec:
    """What an engine must know about the policy before the first weights arrive."""

    config_json: str
    """The Hugging Face config of the policy, as JSON (`config.to_json_string(use_diff=False)`)."""
    max_context_tokens: int
    """Longest prompt plus response that will be asked for."""


class Engine(Protocol):
    """A generation engine. `generate` runs in the collector's event loop; everything else is called by the trainer."""

    @property
    def restarts(self) -> int:
        """How often something that died was started again; 0 for an engine that never does that."""
        ...

    def start(self, spec: PolicySpec) -> None:
        """Start the engine and block until it can take weights.

        Raises:
            EngineError: it did not come up within its deadline.
        """
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Cancelling the awaiting task aborts the request.

        Raises:
            EngineDiedError: the engine is gone.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Make the engine serve these weights as `version`; blocks until it does. Requests in flight continue.

        Args:
            weights: Hugging Face parameter names and tensors; empty to announce a new version of unchanged weights.
            version: The policy version they are.

        Raises:
            EngineError: the engine did not confirm within its deadline.
        """
        ...

    async def probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        """Sample the same response from every replica; shows which weights each of them serves.

        Returns:
            The answer of each replica, by its name.

        Raises:
            EngineError: a replica did not answer; the message names it.
        """
        ...

    def sleep(self) -> None:
        """Give the device's memory back until `wake`; nothing may be in flight. Without effect if it sleeps.

        Raises:
            EngineError: the engine did not confirm within its deadline.
        """
        ...

    def wake(self) -> None:
        """Take the device again; `update_weights` must follow before the next request. Without effect if awake.

        Raises:
            EngineError: the engine did not confirm within its deadline.
        """
        ...

    def check_health(self) -> None:
        """Return if the engine is alive.

        Raises:
            EngineDiedError: it is not; the message ends with the last lines of its log.
        """
        ...

    def describe(self) -> str:
        """Say in one line what there is and how it is; for messages about what takes too long."""
        ...

    def close(self) -> None:
        """Stop the engine; safe to call twice and after a failure."""
        ...


def check_request(request: GenerationRequest, max_context_tokens: int, vocab_size: int) -> None:
    """Refuse what no engine can sample.

    Raises:
        EngineError: the prompt is empty, leaves no room for a token, or has ids outside the vocabulary; or a sampling
            parameter or the seed is out of range.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise EngineError("prompt_ids=() is empty; send at least one token")
    if len(prompt) + 1 > max_context_tokens:
        raise EngineError(
            f"prompt_ids={len(prompt)} tokens leave no room for a response in max_context_tokens={max_context_tokens};"
            " shorten the prompt or raise max_context_tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise EngineError(f"prompt_ids={wrong} is outside the vocabulary; ids run from 0 to {vocab_size - 1}")
    checks = {
        "max_tokens": sampling.max_tokens >= 1,
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
    }
    for field, ok in checks.items():
        if not ok:
            raise EngineError(f"{field}={getattr(sampling, field)} is out of range; see SamplingParams")
    if not 0 <= request.seed < 2**63:
        raise EngineError(f"seed={request.seed} is out of range; set 0 <= seed < 2**63")
