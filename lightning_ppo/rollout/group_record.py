"""What a run's schedule says about one trained prompt group."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_ppo.batch import PromptGroup
from lightning_ppo.validation import is_count


@dataclass(frozen=True)
class GroupRecord:
    """One trained prompt group, without its responses."""

    draw: int
    start_version: int
    """Policy version when it was dispatched."""
    oldest_version: int
    newest_version: int
    """Lowest and highest policy version of its tokens."""
    responses: int
    """CRC-32 of its tokens, masks, log-probs, versions and finish reasons."""
    rewards: int
    """CRC-32 of its rewards. Both equal: training cannot tell the two groups apart."""

    @classmethod
    def of(cls, group: PromptGroup) -> "GroupRecord":
        """Record a finished group."""
        rewards = np.array([row.reward for row in group.trajectories], dtype="<f8").tobytes()
        responses = 0
        for row in group.trajectories:
            responses = zlib.crc32(row.finish_reason.encode(), responses)
            for tensor in (row.response_ids, row.response_mask, row.rollout_logprobs, row.policy_versions):
                responses = zlib.crc32(tensor.numpy().tobytes(), responses)
        return cls(
            draw=group.draw,
            start_version=group.start_version,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            responses=responses,
            rewards=zlib.crc32(rewards),
        )

    @classmethod
    def from_row(cls, draw: int, row: Any) -> "GroupRecord":
        """Read what `as_row` wrote.

        Raises:
            ValueError: it did not write this.
        """
        if not isinstance(row, Sequence) or len(row) not in (3, 5):
            raise ValueError(f"the record of draw {draw} has not 3 or 5 numbers")
        versions = [row[0]] * 3 if len(row) == 3 else row[:3]
        return cls(draw, *versions, *row[-2:])

    def as_row(self) -> list[int]:
        """Return the record without its draw, as it stands in the file.

        `[version, responses, rewards]`, or `[start, oldest, newest, responses, rewards]` where these versions differ.
        """
        versions = [self.start_version, self.oldest_version, self.newest_version]
        return [*(versions[:1] if len(set(versions)) == 1 else versions), self.responses, self.rewards]

    def is_same(self, other: "GroupRecord") -> bool:
        """Whether training cannot tell the two apart."""
        return (self.draw, self.responses, self.rewards) == (other.draw, other.responses, other.rewards)

    def difference(self, recorded: "GroupRecord") -> str:
        """Say what differs from a record of the same draw, for messages; empty if nothing does."""
        now, then = (self.oldest_version, self.newest_version), (recorded.oldest_version, recorded.newest_version)
        if now != then:
            return f"policy versions are {now[0]} to {now[1]}, not {then[0]} to {then[1]}"
        if self.responses != recorded.responses:
            return "responses differ"
        return "" if self.rewards == recorded.rewards else "rewards differ"

    def __post_init__(self) -> None:
        """Refuse what no run can have written.

        Raises:
            ValueError: something is no whole number, or negative.
        """
        for name, value in asdict(self).items():
            if not is_count(value, 0):
                raise ValueError(f"{name}={value!r} is not a whole number >= 0")
