"""The sampler without a gate: prompts start as long as there is room.

Source: `behaviour.md` section 1.3 (`windowed`), own words.
"""

from collections.abc import Sequence
from typing import ClassVar

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.sampler_protocol import Admission, SamplerCapabilities
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.validation import check_count


class WindowedSampler:
    """Never blocks admission; trains what started within the window, from the oldest version allowed to the trainer's.

    Args:
        groups_per_step: P, groups of one step.
        window: How old a group may be.
        freshest_first: Take the newest start version first, instead of the lowest draw.

    Raises:
        ConfigError: `groups_per_step` is not positive.
    """

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(
        stamps_targets=False, supports_streaming=True, supports_restore=True
    )

    def __init__(self, groups_per_step: int, window: VersionWindow, freshest_first: bool = False) -> None:
        check_count("num_prompts_per_step", groups_per_step)
        self._window = window
        self._freshest_first = freshest_first

    @property
    def is_on_policy(self) -> bool:
        """Whether no policy update may lie between sampling and training."""
        return self._window.max_age == 0

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the batch that is being trained: P."""
        return groups_per_step

    def seed_dispatch(self, resume_step: int, version: int, restored: Sequence[int | None] = ()) -> None:
        """Check the numbers; there is no gate to set.

        Raises:
            ConfigError: a number is negative.
        """
        check_count("resume_step", resume_step, 0)
        check_count("version", version, 0)

    def admit(self, version: int) -> Admission | None:
        """Admit a group, without a stamp."""
        return Admission(target_step=None)

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return the ready groups that started within the window, by draw, or newest version first, then by draw."""
        oldest = self._window.oldest_allowed(version)
        if not self._freshest_first:
            return buffer.index.ready_between(limit, oldest, version)
        chosen: list[PromptGroup] = []
        for start_version in reversed(buffer.index.ready_versions(oldest, version)):
            chosen += buffer.index.ready_of_version(limit - len(chosen), start_version)
            if len(chosen) == limit:
                break
        return chosen

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups that started before the window."""
        return buffer.index.ready_started_before(self._window.oldest_allowed(version))

    def aborts_inflight(self, start_version: int, version: int) -> bool:
        """Return whether the group started before the window."""
        return start_version < self._window.oldest_allowed(version)
