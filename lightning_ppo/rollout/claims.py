"""The prompt groups that are being trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_ppo.batch import FailureCounts, PromptGroup
from lightning_ppo.rollout.group_record import GroupRecord
from lightning_ppo.rollout.ledger import Ledger
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.replay import ReplayBuffer


@dataclass(frozen=True)
class Claim:
    """Groups that a PPO step trains next."""

    groups: tuple[PromptGroup, ...]
    """In draw order; empty only when the step lost its last groups for good."""
    groups_in_step: int
    """Groups that the step has in all, as far as is known now."""
    failures: FailureCounts


class Claims:
    """Takes groups out of the buffer's ready ones, in the ledger too, and remembers what the schedule says of them.

    Args:
        buffer: Holds the groups; they keep their slots until `release`.
        ledger: Told what becomes of each draw.
        recorded: An earlier run that is repeated, whose groups they must be.
    """

    def __init__(self, buffer: ReplayBuffer, ledger: Ledger, recorded: RecordedRun | None = None) -> None:
        self._buffer = buffer
        self._ledger = ledger
        self._recorded = recorded
        self._records: dict[int, GroupRecord] = {}

    def take(self, groups: Sequence[PromptGroup]) -> None:
        """Claim ready groups; the caller holds the buffer's lock.

        Raises:
            ValueError: a group is not ready, or named twice; nothing changes.
            RolloutError: a group is not the recorded one; nothing changes.
        """
        records = [GroupRecord.of(group) for group in groups]
        if self._recorded is not None:
            self._recorded.check(zip(groups, records, strict=True))
        self._buffer.claim(groups)
        self._ledger.claim([group.draw for group in groups])
        self._records.update({record.draw: record for record in records})

    def release(self, draws: Iterable[int]) -> list[GroupRecord]:
        """Record claimed groups as trained and free their slots.

        Returns:
            What to write into the run's schedule about them.

        Raises:
            ValueError: a draw is not being trained; nothing changes.
        """
        trained = tuple(draws)
        with self._buffer.changed:
            self._buffer.release(trained)
            self._ledger.train(trained)
        return [self._records.pop(draw) for draw in trained]
