"""The sampler of a repeated run: admits and selects what the recorded run did."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.group_record import GroupRecord
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.sampler_protocol import Admission, SamplerCapabilities


class RecordedSampler:
    """Admits each group at its recorded policy version, and gives each step its recorded groups.

    Args:
        steps: Records of each PPO step.
        by_dispatch: Whether a group is admitted at the version it was dispatched with, or that of its tokens.
    """

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(
        stamps_targets=True, supports_streaming=True, supports_restore=True
    )

    def __init__(self, steps: Mapping[int, Sequence[GroupRecord]], *, by_dispatch: bool) -> None:
        self._admissions = sorted(
            (record.start_version if by_dispatch else record.oldest_version, record.draw, step)
            for step, records in steps.items()
            for record in records
        )
        self._queue: deque[tuple[int, int, int]] = deque()
        self._restored: frozenset[int] = frozenset()

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is trained by the version that it is admitted at."""
        return all(version == step for version, _, step in self._admissions)

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the most groups that exist at once: those of version v and before that steps v and later train."""
        # a step's slots are freed after the next version is published
        changes = sorted(
            change for version, _, step in self._admissions for change in ((version, 1), (max(version, step) + 1, -1))
        )
        most = occupied = 0
        for _, change in changes:
            occupied += change
            most = max(most, occupied)
        return max(groups_per_step, most)

    def leave_out(self, draws: Iterable[int]) -> None:
        """Admit these draws never: they were restored."""
        self._restored = frozenset(draws)

    def seed_dispatch(self, resume_step: int, version: int, restored: Sequence[int | None] = ()) -> None:
        """Continue with the groups of step `resume_step` and later."""
        self._queue = deque(
            (admitted, draw, step)
            for admitted, draw, step in self._admissions
            if step >= resume_step and draw not in self._restored
        )

    def admit(self, version: int) -> Admission | None:
        """Admit the next group of `version`, or of one before whose responses are recorded."""
        if self.is_done(version):
            return None
        _, draw, step = self._queue.popleft()
        return Admission(target_step=step, draw=draw)

    def is_done(self, version: int) -> bool:
        """Whether every group of `version` was admitted; new weights must wait for that."""
        return not self._queue or self._queue[0][0] > version

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return the ready groups of `ppo_step`, in draw order."""
        return buffer.index.ready_of_target(limit, ppo_step)

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Evict nothing."""
        return ()

    def aborts_inflight(self, start_version: int, version: int) -> bool:
        """Abort nothing."""
        return False
