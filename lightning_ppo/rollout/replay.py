"""The replay buffer: one slot per prompt group, from dispatch until its step has been trained."""

import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_ppo.batch import Prompt, PromptGroup, Trajectory

MAX_NAMED = 4
"""Groups in flight that a message names."""


@dataclass(frozen=True)
class PendingGroup:
    """A group that is being generated."""

    group_id: str
    draw: int
    prompt: Prompt
    target_step: int | None
    start_version: int
    dispatched_s: float
    """Time of dispatch on the buffer's clock."""


class ReplayBuffer:
    """Slots in dispatch order: pending (generating), ready (finished), claimed (being trained).

    A slot is a permit: a group occupies one place from `reserve` until `release` or `remove`, so permits cannot leak
    and trained rows keep theirs until the whole step is over. Thread-safe: the event loop reserves and commits, the
    trainer waits on `changed`, claims and releases. Nothing is dropped: groups that a selection leaves stay ready.

    Args:
        capacity: Groups that may exist at once.
        group_size: Trajectories per group.
        clock: Seconds, monotonic.
    """

    def __init__(self, capacity: int, group_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Notified after every commit and every claim that is given back."""
        self._capacity = capacity
        self._group_size = group_size
        self._clock = clock
        self._pending: dict[str, PendingGroup] = {}
        self._ready: list[PromptGroup] = []
        self._claimed: dict[int, PromptGroup] = {}
        self._draws: set[int] = set()
        self._last_commit_s = clock()

    def reserve(self, draw: int, prompt: Prompt, version: int, target_step: int | None) -> str:
        """Take a slot for a group that is about to be generated; the order of these calls is the dispatch order.

        Returns:
            The group's id, which depends on the draw only.

        Raises:
            ValueError: the buffer is full, or a slot for this draw exists.
        """
        with self.changed:
            if not self.has_room:
                raise ValueError(f"all {self._capacity} slots are taken")
            if draw in self._draws:
                raise ValueError(f"draw {draw} has a slot already")
            group_id = f"draw{draw}"
            self._draws.add(draw)
            self._pending[group_id] = PendingGroup(group_id, draw, prompt, target_step, version, self._clock())
            return group_id

    def commit(self, group_id: str, trajectories: Sequence[Trajectory], end_version: int) -> PromptGroup:
        """Make a pending group ready.

        Raises:
            ValueError: no such group is pending, or the number of trajectories is not `group_size`; nothing changes.
        """
        with self.changed:
            slot = self._slot(group_id)
            if len(trajectories) != self._group_size:
                raise ValueError(f"{group_id} has {len(trajectories)} of {self._group_size} trajectories")
            now = self._clock()
            group = PromptGroup(
                group_id=group_id,
                draw=slot.draw,
                prompt=slot.prompt,
                target_step=slot.target_step,
                start_version=slot.start_version,
                end_version=end_version,
                trajectories=tuple(trajectories),
                generation_s=now - slot.dispatched_s,
            )
            del self._pending[group_id]
            insort(self._ready, group, key=_draw)
            self._last_commit_s = now
            self.changed.notify_all()
            return group

    def remove(self, group_id: str) -> None:
        """Give up a pending group and its slot.

        Raises:
            ValueError: no such group is pending.
        """
        with self.changed:
            slot = self._slot(group_id)
            del self._pending[group_id]
            self._draws.discard(slot.draw)

    def claim(self, groups: Iterable[PromptGroup]) -> None:
        """Move ready groups to training; they keep their slots.

        Raises:
            ValueError: a group is not ready, or named twice; nothing changes.
        """
        with self.changed:
            chosen = {group.draw: group for group in groups}
            left = [group for group in self._ready if group.draw not in chosen]
            if len(left) + len(chosen) != len(self._ready):
                raise ValueError(f"draws {sorted(chosen)} are not all ready")
            self._ready = left
            self._claimed.update(chosen)

    def release(self, draws: Iterable[int]) -> None:
        """Free the slots of trained groups.

        Raises:
            ValueError: a draw is not claimed; nothing changes.
        """
        with self.changed:
            gone = set(draws)
            if not gone <= self._claimed.keys():
                raise ValueError(f"draws {sorted(gone - self._claimed.keys())} are not being trained")
            for draw in gone:
                del self._claimed[draw]
            self._draws -= gone

    def unclaim(self) -> None:
        """Make every claimed group ready again, in its old place."""
        with self.changed:
            for group in self._claimed.values():
                insort(self._ready, group, key=_draw)
            self._claimed.clear()
            self.changed.notify_all()

    def ready(self) -> tuple[PromptGroup, ...]:
        """Return the ready groups in dispatch order."""
        with self.changed:
            return tuple(self._ready)

    def pending(self) -> tuple[PendingGroup, ...]:
        """Return the groups that are being generated, in dispatch order."""
        with self.changed:
            return tuple(self._pending.values())

    def claimed(self) -> tuple[int, ...]:
        """Return the draws that are being trained, in order."""
        with self.changed:
            return tuple(sorted(self._claimed))

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        with self.changed:
            return len(self._draws) < self._capacity

    @property
    def occupied(self) -> int:
        """Slots taken by pending, ready and claimed groups."""
        with self.changed:
            return len(self._draws)

    @property
    def last_commit_s(self) -> float:
        """Time of the last commit (at first: of construction) on the buffer's clock."""
        with self.changed:
            return self._last_commit_s

    def describe(self) -> str:
        """Say what is in the buffer, the oldest groups in flight by name, for messages."""
        with self.changed:
            now = self._clock()
            pending = list(self._pending.values())
            named = [f"draw {g.draw} (row {g.prompt.row}, {now - g.dispatched_s:.1f} s)" for g in pending[:MAX_NAMED]]
            more = ["..."] if len(pending) > MAX_NAMED else []
            return (
                f"in flight: {len(pending)} [{', '.join(named + more)}], ready {len(self._ready)}, "
                f"in training {len(self._claimed)} of {self._capacity} slots"
            )

    def _slot(self, group_id: str) -> PendingGroup:
        if group_id not in self._pending:
            raise ValueError(f"{group_id} is not being generated")
        return self._pending[group_id]


def _draw(group: PromptGroup) -> int:
    return group.draw
