"""Samplers that admit one batch after another: batch i of a run is what PPO step i needs.

Source: `behaviour.md` sections 1.2 and 1.3 (`in_order`, `ready_first`, `weight_fifo`), own words.
"""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.sampler_protocol import Admission, SamplerCapabilities
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.validation import check_count


class _GatedSampler:
    """Admits batch b, P groups, as soon as a version v with b <= v + lead(v) is published.

    Args:
        groups_per_step: P, groups of one batch.
        window: How far batches may run ahead of the trainer.

    Raises:
        ConfigError: `groups_per_step` is not positive.
    """

    def __init__(self, groups_per_step: int, window: VersionWindow) -> None:
        check_count("num_prompts_per_step", groups_per_step)
        self._groups_per_step = groups_per_step
        self._window = window
        self._step_ahead_of_version = 0
        self._batch = 0
        self._left = groups_per_step

    @property
    def is_on_policy(self) -> bool:
        """Whether no policy update lies between sampling and training."""
        return self._window.peak_policy_age == 0

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the live batch plus the batches ahead of it, at their peak: P * (peak lead + 1)."""
        return groups_per_step * (self._window.peak_lead + 1)

    def seed_dispatch(self, resume_step: int, version: int, restored: Sequence[int | None] = ()) -> None:
        """Continue at PPO step `resume_step` and policy `version`.

        The restored slots are the first that would be admitted; from here on the gate admits what is missing.

        Raises:
            ConfigError: a number is negative.
        """
        check_count("resume_step", resume_step, 0)
        check_count("version", version, 0)
        self._step_ahead_of_version = resume_step - version
        full, started = divmod(len(restored), self._groups_per_step)
        self._open_batch(resume_step + full)
        self._left -= started

    def admit(self, version: int) -> Admission | None:
        """Admit the next group through the gate, without a stamp."""
        return None if self._next_batch(version) is None else Admission(target_step=None)

    def aborts_inflight(self, start_version: int, version: int) -> bool:
        """Return False: what is admitted is finished."""
        return False

    def _open_batch(self, batch: int) -> None:
        self._batch = batch
        self._left = self._missing(batch)

    def _missing(self, batch: int) -> int:
        """Return how many groups of a batch must be admitted."""
        return self._groups_per_step

    def _next_batch(self, version: int) -> int | None:
        """Return the PPO step whose batch the next group belongs to, and count it; None while the gate is shut."""
        while self._left == 0:
            self._open_batch(self._batch + 1)
        if self._batch - self._step_ahead_of_version > version + self._window.lead(version):
            return None
        self._left -= 1
        return self._batch


class InOrderSampler(_GatedSampler):
    """Every group is trained in the PPO step it was dispatched for: target step = step of its batch.

    Args:
        groups_per_step: P, groups of one batch.
        window: How far batches may run ahead of the trainer.
    """

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(
        stamps_targets=True, supports_streaming=True, supports_restore=True
    )

    def __init__(self, groups_per_step: int, window: VersionWindow) -> None:
        super().__init__(groups_per_step, window)
        self._restored: Counter[int] = Counter()

    def seed_dispatch(self, resume_step: int, version: int, restored: Sequence[int | None] = ()) -> None:
        """Continue at PPO step `resume_step` and policy `version`.

        A step whose slots are not all restored is topped up with exactly the missing number, lowest step first. Slots
        of steps before `resume_step` do not count: they are evicted.

        Raises:
            ConfigError: a number is negative.
            CheckpointError: a restored slot is not stamped, or a step has more than P of them.
        """
        counts: Counter[int] = Counter()
        for target in restored:
            if target is None:
                raise CheckpointError(
                    "a restored rollout has no target step; resume with the sampler of the checkpoint"
                )
            counts[target] += 1
        for target, count in counts.items():
            if target >= resume_step and count > self._groups_per_step:
                raise CheckpointError(
                    f"{count} restored rollouts are stamped for PPO step {target}, "
                    f"num_prompts_per_step={self._groups_per_step}; resume with the settings of the checkpoint"
                )
        self._restored = counts
        super().seed_dispatch(resume_step, version)

    def admit(self, version: int) -> Admission | None:
        """Admit the next group of the current batch, stamped with its step."""
        batch = self._next_batch(version)
        return None if batch is None else Admission(target_step=batch)

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return the ready groups stamped with `ppo_step`, in draw order; start versions do not matter."""
        return buffer.index.ready_of_target(limit, ppo_step)

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups stamped for a step that is over."""
        return buffer.index.ready_before_target(ppo_step)

    def _missing(self, batch: int) -> int:
        return self._groups_per_step - self._restored.pop(batch, 0)


class ReadyFirstSampler(_GatedSampler):
    """Whatever is finished first is trained first, however old: nothing is stamped and nothing is evicted.

    Args:
        groups_per_step: P, groups of one batch.
        window: How far batches may run ahead of the trainer.
    """

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(
        stamps_targets=False, supports_streaming=True, supports_restore=True
    )

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return every ready group of this or an earlier version, in draw order."""
        return buffer.index.first_ready(limit, version)

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return nothing."""
        return ()


class WeightFifoSampler(_GatedSampler):
    """Finishes the oldest policy version first: newer groups wait until all of it is finished and taken.

    The window reaches from the oldest version that may be trained to the trainer's. When no group of the oldest version
    in it is being generated any more and a step still lacks groups, the next version follows in the same selection;
    otherwise a version with fewer groups than a chunk needs would block forever.

    Args:
        groups_per_step: P, groups of one batch.
        window: How far batches may run ahead of the trainer, and how old a group may be.
    """

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(
        stamps_targets=False, supports_streaming=True, supports_restore=True
    )

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return the ready groups of the oldest version in the window, in draw order; then see the class."""
        chosen: list[PromptGroup] = []
        for oldest in buffer.index.live_versions(self._window.oldest_allowed(version), version):
            chosen += buffer.index.ready_of_version(limit - len(chosen), oldest)
            if len(chosen) == limit or buffer.index.has_pending_of_version(oldest):
                break
        return chosen

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups that started before the window."""
        return buffer.index.ready_started_before(self._window.oldest_allowed(version))
