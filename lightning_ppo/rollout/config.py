"""Settings of the rollouts: a frozen dataclass that checks itself. Each engine has its own beside its code."""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.windows import check_window
from lightning_ppo.validation import (
    check_choice,
    check_choices,
    check_count,
    check_kind,
    check_number,
    is_count,
    reject,
    require,
)

Restore = Literal["fill", "drop_incomplete", "none"]
SAMPLERS = ("in_order", "ready_first", "windowed", "weight_fifo")


@dataclass(frozen=True)
class RolloutConfig:
    """How many rollouts a PPO step takes, how they are sampled, and in which order they are trained.

    Args:
        num_prompts_per_step: P: prompt groups per PPO step.
        num_generations_per_prompt: G: responses per prompt; a group is trained as a whole.
        min_groups_for_streaming_train: Finished groups that are worth training on. Below `num_prompts_per_step` the
            step streams: chunks are trained while the rest is still being generated. Equal to it: one full batch.
        sampler: `in_order` trains every prompt in the step it was drawn for; `ready_first` trains whatever is finished
            first; `windowed` starts prompts as long as there is room; `weight_fifo` finishes the oldest policy version
            first; `package.module:Class` or `path/to/file.py:Class` is your own.
        sampler_options: Keyword arguments of your own sampler.
        sample_freshest_first: `windowed` only: train the groups of the newest policy version first.
        max_lookahead_versions: How many policy versions generation may run ahead of training. 0: every response is
            sampled from the policy that it trains (generation still overlaps the critic's training). At most
            `max_trajectory_age_steps`.
        max_trajectory_age_steps: How many policy updates old a trained response may be, at most; a group that gets
            older is generated again. Versions of a policy frozen in critic warm-up do not count.
        warmup_generation_lead_steps: Critic warm-up only: how many PPO steps generation may run ahead while the policy
            is frozen, at least `max_trajectory_age_steps`; None means `max_lookahead_versions`.
        in_flight_weight_updates: Whether responses that are being generated go on with new weights in mid-sequence;
            False finishes them first.
        recompute_kv_cache_after_weight_updates: Whether keys and values of the old weights are dropped after an update,
            in engines that keep them (vLLM); False trades exactness for speed.
        colocated: Generation shares the training device: it sleeps from the selection of a step's rollouts until its
            critic is trained, and gets new weights then. Needs full-batch mode and no lookahead.
        max_buffered_rollouts: Groups that may exist at once, from dispatch until trained; None means one batch more
            than the sampler needs.
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
        timeout_s: Deadline for every wait on rollouts: without any finished group (validate and predict: response) for
            this long the run fails, or warns (`failures.stall_action`).
        reward_timeout_s: Deadline of one call of an asynchronous (or remote) reward function.
        reward_workers: Ray actors that compute rewards, for functions that are slow; 0 computes them in the collector.
        failures: What happens when a rollout fails.
        restore: What a resumed run does with the rollouts of its checkpoint and journal: `fill` keeps them and
            generates what is missing; `drop_incomplete` keeps complete steps only; `none` generates all again.
        journal: Append finished groups to the run's folder as they arrive, so that a kill between two checkpoints does
            not lose them.
        record_rollouts: Keep the whole journal: `replay_schedule` can then repeat a run without generating.
        replay_chunks: A `schedule.jsonl` of an earlier run: every step uses the chunks recorded there.
        replay_schedule: A `schedule.jsonl` of an earlier run: repeat its admissions, versions and chunks exactly.
    """

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 4
    min_groups_for_streaming_train: int = 8
    sampler: str = "in_order"
    sampler_options: dict[str, Any] = field(default_factory=dict)
    sample_freshest_first: bool = False
    max_lookahead_versions: int = 0
    max_trajectory_age_steps: int = 1
    warmup_generation_lead_steps: int | None = None
    in_flight_weight_updates: bool = True
    recompute_kv_cache_after_weight_updates: bool = True
    colocated: bool = False
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
    reward_workers: int = 0
    failures: FailureConfig = FailureConfig()  # noqa: RUF009 - frozen
    restore: Restore = "fill"
    journal: bool = True
    record_rollouts: bool = False
    replay_chunks: str | None = None
    replay_schedule: str | None = None

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self)
        check_kind("failures", self.failures, FailureConfig)
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
        if self.max_inflight_prompts is not None:
            check_count("max_inflight_prompts", self.max_inflight_prompts)
        check_number("temperature", self.temperature, 0, open_low=True)
        require(self.top_p == 1, "top_p", self.top_p, "is not supported in training", "use validation_top_p")
        require(self.top_k == 0, "top_k", self.top_k, "is not supported in training", "use validation_top_k")
        check_number("validation_temperature", self.validation_temperature, 0)
        check_number("validation_top_p", self.validation_top_p, 0, 1, open_low=True)
        check_count("validation_top_k", self.validation_top_k, 0)
        for name, off in (("validation_top_p", 1), ("validation_top_k", 0)):
            value, why = getattr(self, name), "has no effect with validation_temperature=0, which is greedy"
            ok = value == off or self.validation_temperature > 0
            require(ok, name, value, why, "set validation_temperature > 0, or drop it")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            ok = isinstance(ids, (tuple, list)) and all(is_count(token, 0) for token in ids)
            require(ok, "stop_token_ids", self.stop_token_ids, "are no token ids", "set a tuple of whole numbers >= 0")
        if self.seed is not None:
            check_count("seed", self.seed, 0)
        check_number("timeout_s", self.timeout_s, 0, open_low=True)
        check_number("reward_timeout_s", self.reward_timeout_s, 0, open_low=True)
        check_count("reward_workers", self.reward_workers, 0)
        self._check_order()
        self._check_replay()

    def _check_order(self) -> None:
        if not isinstance(self.sampler, str) or ":" not in self.sampler:
            check_choice("sampler", self.sampler, (*SAMPLERS, "package.module:Class"))
            if self.sampler_options:
                raise reject(
                    "sampler_options", self.sampler_options, f"is not read by sampler={self.sampler}", "drop it"
                )
        if self.sample_freshest_first:
            require(
                self.sampler == "windowed",
                "sample_freshest_first",
                True,
                f"is not read by sampler={self.sampler}",
                "set sampler=windowed",
            )
        check_window(self.max_lookahead_versions, self.max_trajectory_age_steps, self.warmup_generation_lead_steps)
        if self.max_buffered_rollouts is not None:
            # a lead in critic warm-up may need more, which the sampler tells: it knows how long warm-up is
            need = self.num_prompts_per_step * (self.max_lookahead_versions + 1)
            require(
                self.max_buffered_rollouts >= need,
                "max_buffered_rollouts",
                self.max_buffered_rollouts,
                "would deadlock",
                f"set at least num_prompts_per_step * (max_lookahead_versions + 1) = {need}",
            )
        if self.colocated:
            full = self.num_prompts_per_step
            why = "keeps generating while the training device is in use, but colocated=True"
            minimum = self.min_groups_for_streaming_train
            require(minimum == full, "min_groups_for_streaming_train", minimum, why, f"set {full}")
            require(self.peak_lead == 0, "max_lookahead_versions", self.peak_lead, why, "set 0")
            require(self.sampler == "in_order", "sampler", self.sampler, why, "set in_order")

    def _check_replay(self) -> None:
        if self.replay_schedule is not None and self.replay_chunks is not None:
            raise reject(
                "replay_chunks", self.replay_chunks, "is part of replay_schedule already", "set only one of them"
            )
        if self.record_rollouts:
            require(self.journal, "record_rollouts", True, "keeps the journal, which is off", "set journal=True")

    @property
    def run_seed(self) -> int:
        """`seed`, or Lightning's global seed as it is now."""
        return self.seed if self.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))

    @property
    def is_streaming(self) -> bool:
        """Whether a step may consist of several chunks."""
        return self.min_groups_for_streaming_train < self.num_prompts_per_step

    @property
    def peak_lead(self) -> int:
        """Most PPO steps that generation ever runs ahead of training."""
        return max(self.max_lookahead_versions, self.warmup_generation_lead_steps or 0)

    @property
    def buffer_capacity(self) -> int:
        """Groups that may exist at once."""
        if self.max_buffered_rollouts is not None:
            return self.max_buffered_rollouts
        return self.num_prompts_per_step * (self.peak_lead + 2)

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
