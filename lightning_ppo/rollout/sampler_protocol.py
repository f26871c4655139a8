"""What a sampler is: it decides when a group may be dispatched, and which finished groups a PPO step may train."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.replay import ReplayBuffer


@dataclass(frozen=True)
class Admission:
    """Leave to dispatch one group."""

    target_step: int | None
    """The PPO step that must train the group, or None for any."""
    draw: int | None = None
    """The very draw to dispatch; None: the next one of the prompt stream."""


@dataclass(frozen=True)
class SamplerCapabilities:
    """What a run may ask of a sampler."""

    stamps_targets: bool
    """Every admission carries a target step."""
    supports_streaming: bool
    """The tail rule may cut its selection into chunks: whatever is left becomes ready sooner or later."""
    supports_restore: bool
    """Rollouts of a checkpoint may be put back into the buffer; their slots are handed to `seed_dispatch`."""


@runtime_checkable
class Sampler(Protocol):
    """Decides on dispatch (in the event loop) and on selection (in the trainer's thread); no method may block.

    Staleness is not a sampler's business: ready groups that are too old are generated again whatever it says. Of the
    buffer it reads `buffer.index`; it changes nothing. `select` and `evict` are called with the buffer's lock held.
    """

    capabilities: ClassVar[SamplerCapabilities]
    """A class of your own must declare this itself: what it inherits may not hold for it."""

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is trained by the very policy that it was sampled from."""
        ...

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the fewest buffer slots with which generation keeps up; 0: any number."""
        ...

    def seed_dispatch(self, resume_step: int, version: int, restored: Sequence[int | None] = ()) -> None:
        """Continue at PPO step `resume_step`, whose rollouts are the first of policy `version`; 0, 0 is a fresh start.

        Args:
            resume_step: The next PPO step.
            version: The policy version that trains it.
            restored: The target step of every slot that is taken already, None where it is not stamped.

        Raises:
            ConfigError: a number is negative.
            CheckpointError: the restored slots cannot be this sampler's.
        """
        ...

    def admit(self, version: int) -> Admission | None:
        """Admit the next group while the trainer is at `version`; None: ask again when the version changes."""
        ...

    def select(self, buffer: ReplayBuffer, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Return the first `limit` ready groups that `ppo_step` may train now, in the order in which to take them."""
        ...

    def evict(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups that would never be selected any more, from `ppo_step` on."""
        ...

    def aborts_inflight(self, start_version: int, version: int) -> bool:
        """Return whether a group that started at `start_version` is not worth finishing at `version`."""
        ...
