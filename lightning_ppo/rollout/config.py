"""Settings of the rollouts and of the built-in engine: frozen dataclasses that check themselves."""

from dataclasses import dataclass
from typing import Literal

from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.validation import check_choice, check_count, check_number, require


@dataclass(frozen=True)
class RolloutConfig:
    """How many rollouts a PPO step takes, how they are sampled, and in which order they are trained.

    Args:
        num_prompts_per_step: P: prompt groups per PPO step.
        num_generations_per_prompt: G: responses per prompt; a group is trained as a whole.
        min_groups_for_streaming_train: Finished groups that are worth training on. Below `num_prompts_per_step` the
            step streams: chunks are trained while the rest is still being generated. Equal to it: one full batch.
        sampler: `in_order` trains every prompt in the step it was drawn for; `ready_first` trains whatever is finished
            first (off-policy: needs importance correction).
        max_lookahead_versions: How many policy versions generation may run ahead of training. 0: every response is
            sampled from the policy that it trains (generation still overlaps the critic's training).
        max_buffered_rollouts: Groups that may exist at once, from dispatch until trained; None means
            num_prompts_per_step * (max_lookahead_versions + 2).
        max_inflight_prompts: Groups being generated at once; None means as many as are buffered.
        max_response_tokens: Longest response; one that hits it is marked truncated.
        temperature: Sampling temperature in training; the trainer applies the same to its own log-probs.
        top_p: Rejected in training unless 1: the trainer cannot reproduce filtered log-probs.
        top_k: Rejected in training unless 0.
        stop_token_ids: Tokens that end a response; None means the tokenizer's end-of-sequence token.
        validation_temperature: Temperature for validate and predict; 0 is greedy.
        validation_top_p: Nucleus filter for validate and predict.
        validation_top_k: Top-k filter for validate and predict; 0 is off.
        shuffle: Shuffle the prompts anew in every epoch, from the seed.
        seed: Seed of the prompt order and of every response; None means Lightning's global seed, or 0.
        timeout_s: Deadline for every wait on rollouts: without any finished group for this long the run fails.
        reward_timeout_s: Deadline of one call of an asynchronous reward function.
        replay_chunks: A `chunks.jsonl` of an earlier run: every step uses the chunks recorded there.
    """

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 4
    min_groups_for_streaming_train: int = 8
    sampler: Literal["in_order", "ready_first"] = "in_order"
    max_lookahead_versions: int = 0
    max_buffered_rollouts: int | None = None
    max_inflight_prompts: int | None = None
    max_response_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    validation_temperature: float = 0.0
    validation_top_p: float = 1.0
    validation_top_k: int = 0
    shuffle: bool = True
    seed: int | None = None
    timeout_s: float = 600.0
    reward_timeout_s: float = 60.0
    replay_chunks: str | None = None

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        for name in (
            "num_prompts_per_step",
            "num_generations_per_prompt",
            "min_groups_for_streaming_train",
            "max_response_tokens",
        ):
            check_count(name, getattr(self, name))
        require(
            self.min_groups_for_streaming_train <= self.num_prompts_per_step,
            "min_groups_for_streaming_train",
            self.min_groups_for_streaming_train,
            f"is above num_prompts_per_step={self.num_prompts_per_step}",
            "set it equal for full-batch mode, or lower to stream",
        )
        check_choice("sampler", self.sampler, ("in_order", "ready_first"))
        check_count("max_lookahead_versions", self.max_lookahead_versions, 0)
        if self.max_buffered_rollouts is not None:
            need = self.num_prompts_per_step * (self.max_lookahead_versions + 1)
            require(
                self.max_buffered_rollouts >= need,
                "max_buffered_rollouts",
                self.max_buffered_rollouts,
                "would deadlock",
                f"set at least num_prompts_per_step * (max_lookahead_versions + 1) = {need}",
            )
        if self.max_inflight_prompts is not None:
            check_count("max_inflight_prompts", self.max_inflight_prompts)
        check_number("temperature", self.temperature, 0, open_low=True)
        require(self.top_p == 1, "top_p", self.top_p, "is not supported in training", "use validation_top_p")
        require(self.top_k == 0, "top_k", self.top_k, "is not supported in training", "use validation_top_k")
        check_number("validation_temperature", self.validation_temperature, 0)
        check_number("validation_top_p", self.validation_top_p, 0, 1, open_low=True)
        check_count("validation_top_k", self.validation_top_k, 0)
        if self.seed is not None:
            check_count("seed", self.seed, 0)
        check_number("timeout_s", self.timeout_s, 0, open_low=True)
        check_number("reward_timeout_s", self.reward_timeout_s, 0, open_low=True)

    @property
    def is_streaming(self) -> bool:
        """Whether a step may consist of several chunks."""
        return self.min_groups_for_streaming_train < self.num_prompts_per_step

    @property
    def can_be_off_policy(self) -> bool:
        """Whether a trained response may come from an older policy."""
        return self.max_lookahead_versions > 0 or self.sampler == "ready_first"

    @property
    def buffer_capacity(self) -> int:
        """Groups that may exist at once."""
        if self.max_buffered_rollouts is not None:
            return self.max_buffered_rollouts
        return self.num_prompts_per_step * (self.max_lookahead_versions + 2)

    @property
    def inflight_capacity(self) -> int:
        """Groups that may be generated at once."""
        return self.buffer_capacity if self.max_inflight_prompts is None else self.max_inflight_prompts

    def training_sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return how training responses are sampled."""
        return SamplingParams(self.max_response_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)

    def validation_sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return how responses of validate and predict are sampled."""
        temperature, top_p, top_k = self.validation_temperature, self.validation_top_p, self.validation_top_k
        return SamplingParams(self.max_response_tokens, temperature, top_p, top_k, stop_token_ids)


@dataclass(frozen=True)
class LocalEngineConfig:
    """The built-in engine: one process of its own on this machine.

    Args:
        slots: Responses generated at once; finished ones are replaced at once.
        num_threads: Threads of the engine's process.
        trainer_threads: Threads of the trainer's process while the engine runs; None leaves torch's setting.
        device: Where the engine computes, for example `cpu` or `cuda:0`.
        dtype: Precision of the engine's weights; `float32` keeps its log-probs equal to the trainer's.
        start_timeout_s: Deadline for the engine's process to come up.
        update_timeout_s: Deadline for new weights to be confirmed.
        backend: `auto` uses the fast decoder for Llama- and Qwen-style models and transformers' own forward for others;
            `native` and `transformers` force one of them.
    """

    slots: int = 128
    num_threads: int = 1
    trainer_threads: int | None = 1
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    start_timeout_s: float = 120.0
    update_timeout_s: float = 60.0
    backend: Literal["auto", "native", "transformers"] = "auto"

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_count("slots", self.slots)
        check_count("num_threads", self.num_threads)
        if self.trainer_threads is not None:
            check_count("trainer_threads", self.trainer_threads)
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        check_choice("backend", self.backend, ("auto", "native", "transformers"))
        check_number("start_timeout_s", self.start_timeout_s, 0, open_low=True)
        check_number("update_timeout_s", self.update_timeout_s, 0, open_low=True)
