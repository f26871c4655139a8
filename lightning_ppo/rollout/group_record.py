"""What a run's schedule says about one trained prompt group."""

import zlib
from dataclasses import asdict, dataclass

import numpy as np

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.journal import newest_version


@dataclass(frozen=True)
class GroupRecord:
    """One trained prompt group, without its responses."""

    draw: int
    start_version: int
    """Policy version when it was dispatched."""
    oldest_version: int
    newest_version: int
    """Lowest and highest policy version of its tokens."""
    digest: int
    """CRC-32 of its tokens, log-probs, versions and rewards: equal digests mean bitwise equal rollouts."""

    @classmethod
    def of(cls, group: PromptGroup) -> "GroupRecord":
        """Record a finished group."""
        digest = group_digest(group)
        return cls(group.draw, group.start_version, group.oldest_version, newest_version(group), digest)

    def as_row(self) -> list[int]:
        """Return the record as it stands in the file."""
        return [self.draw, self.start_version, self.oldest_version, self.newest_version, self.digest]

    def __post_init__(self) -> None:
        """Refuse what no run can have written.

        Raises:
            ValueError: a number is missing or negative.
        """
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value!r} is not a whole number >= 0")


def group_digest(group: PromptGroup) -> int:
    """Return the CRC-32 of everything about a group's responses that training sees."""
    value = zlib.crc32(np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64).tobytes())
    for trajectory in group.trajectories:
        for tensor in (trajectory.response_ids, trajectory.rollout_logprobs, trajectory.policy_versions):
            value = zlib.crc32(tensor.numpy().tobytes(), value)
    return value
