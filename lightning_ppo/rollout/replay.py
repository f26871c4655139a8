"""The replay buffer: one slot per prompt group, from dispatch until its step has been trained."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from lightning_ppo.batch import Prompt, PromptGroup, Trajectory
from lightning_ppo.rollout.replay_index import PendingGroup, ReplayIndex

__all__ = ["PendingGroup", "ReplayBuffer"]

MAX_NAMED = 4
"""Groups in flight that a message names."""


class ReplayBuffer:
    """Slots in draw order: pending (generating), ready (finished), claimed (being trained).

    A slot is a permit: a group occupies one place until `release`, `drop`, `remove` or `give_back`, so permits cannot
    leak and trained rows keep theirs until the whole step is over. Thread-safe: the event loop reserves and commits,
    the trainer waits on `changed`, claims and releases. Nothing is dropped: groups that a selection leaves stay ready.
    Methods take O(log n) comparisons per group that they name; `ready`, `pending` and `targets` walk through all.

    Args:
        capacity: Groups that may exist at once.
        group_size: Trajectories per group.
        clock: Seconds, monotonic.
    """

    def __init__(self, capacity: int, group_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Notified whenever a selection may have become possible; its lock is reentrant."""
        self.index = ReplayIndex(self.changed)
        """Look-ups for samplers."""
        self._capacity = capacity
        self._group_size = group_size
        self._clock = clock
        self._pending: dict[str, PendingGroup] = {}
        self._claimed: dict[int, PromptGroup] = {}

    def reserve(self, draw: int, prompt: Prompt, version: int, target_step: int | None) -> PendingGroup:
        """Take a slot for a group that is about to be generated; its id depends on the draw only.

        Raises:
            ValueError: the buffer is full, or a slot for this draw exists.
        """
        with self.changed:
            self._check_free(draw)
            slot = PendingGroup(_group_id(draw), draw, prompt, target_step, version, self._clock())
            self._add_pending(slot)
            return slot

    def restore(self, group: PromptGroup) -> None:
        """Take a slot for a group that was finished in an earlier run; it is ready at once.

        Raises:
            ValueError: the buffer is full, a slot for this draw exists, or the number of trajectories is not
                `group_size`; nothing changes.
        """
        with self.changed:
            self._check_free(group.draw)
            self._check_size(group.group_id, group.trajectories)
            self.index.add_ready(group)
            self.changed.notify_all()

    def commit(self, group_id: str, trajectories: Sequence[Trajectory], end_version: int) -> PromptGroup:
        """Make a pending group ready.

        Raises:
            ValueError: no such group is pending, or the number of trajectories is not `group_size`; nothing changes.
        """
        with self.changed:
            slot = self._slot(group_id)
            self._check_size(group_id, trajectories)
            group = PromptGroup(
                group_id=group_id,
                draw=slot.draw,
                prompt=slot.prompt,
                target_step=slot.target_step,
                start_version=slot.start_version,
                end_version=end_version,
                trajectories=tuple(trajectories),
                generation_s=self._clock() - slot.dispatched_s,
            )
            self._remove_pending(slot)
            self.index.add_ready(group)
            self.changed.notify_all()
            return group

    def regenerate(self, draw: int, version: int) -> PendingGroup:
        """Turn a ready or pending group into one that is generated from the start, at `version`.

        Draw, slot and target step stay; what was committed is forgotten, and the time of dispatch is now.

        Raises:
            ValueError: the draw is neither ready nor pending; nothing changes.
        """
        with self.changed:
            ready = self.index.find_ready(draw)
            pending = self._pending.get(_group_id(draw))
            if ready is not None:
                self.index.remove_ready(ready)
            elif pending is not None:
                self._remove_pending(pending)
            old: PromptGroup | PendingGroup | None = ready or pending
            if old is None:
                raise ValueError(f"draw {draw} is neither ready nor being generated")
            slot = PendingGroup(_group_id(draw), draw, old.prompt, old.target_step, version, self._clock())
            self._add_pending(slot)
            self.changed.notify_all()
            return slot

    def give_back(self, draws: Iterable[int]) -> None:
        """Free the slots of ready groups, whose draws are handed out anew.

        Raises:
            ValueError: a draw is not ready, or named twice; nothing changes.
        """
        with self.changed:
            for group in self._ready_groups(draws):
                self.index.remove_ready(group)
            self.changed.notify_all()

    def remove(self, group_id: str) -> None:
        """Give up a pending group and its slot.

        Raises:
            ValueError: no such group is pending.
        """
        with self.changed:
            self._remove_pending(self._slot(group_id))
            self.changed.notify_all()

    def claim(self, groups: Iterable[PromptGroup]) -> None:
        """Move ready groups to training; they keep their slots.

        Raises:
            ValueError: a group is not ready, or named twice; nothing changes.
        """
        with self.changed:
            for group in self._ready_groups(group.draw for group in groups):
                self.index.remove_ready(group)
                self._claimed[group.draw] = group

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

    def stale(self, oldest_allowed: int) -> tuple[PromptGroup, ...]:
        """Return the ready groups with a token of a version below `oldest_allowed`, oldest first.

        Args:
            oldest_allowed: `VersionWindow.oldest_allowed` of the version that trains next.
        """
        return self.index.ready_sampled_before(oldest_allowed)

    def claimed(self) -> tuple[PromptGroup, ...]:
        """Return the groups that are being trained, in draw order."""
        with self.changed:
            return tuple(group for _, group in sorted(self._claimed.items()))

    def ready(self) -> tuple[PromptGroup, ...]:
        """Return the ready groups in draw order."""
        return self.index.ready()

    def pending(self) -> tuple[PendingGroup, ...]:
        """Return the groups that are being generated, in draw order."""
        with self.changed:
            return tuple(sorted(self._pending.values(), key=lambda slot: slot.draw))

    def is_pending(self, draw: int) -> bool:
        """Whether a group is being generated."""
        with self.changed:
            return _group_id(draw) in self._pending

    def targets(self) -> tuple[int | None, ...]:
        """Return the target step of every slot, pending, ready and claimed, for `Sampler.seed_dispatch`."""
        with self.changed:
            groups: tuple[PendingGroup | PromptGroup, ...]
            groups = (*self._pending.values(), *self.index.ready(), *self._claimed.values())
            return tuple(group.target_step for group in groups)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return self.occupied < self._capacity

    @property
    def occupied(self) -> int:
        """Slots taken by pending, ready and claimed groups."""
        with self.changed:
            return len(self._pending) + self.index.ready_count + len(self._claimed)

    @property
    def ready_count(self) -> int:
        """Number of ready groups."""
        return self.index.ready_count

    def describe(self) -> str:
        """Say what is in the buffer, the oldest groups in flight by name, for messages."""
        with self.changed:
            now = self._clock()
            pending = list(self._pending.values())
            named = [f"draw {g.draw} (row {g.prompt.row}, {now - g.dispatched_s:.1f} s)" for g in pending[:MAX_NAMED]]
            more = ["..."] if len(pending) > MAX_NAMED else []
            return (
                f"in flight: {len(pending)} [{', '.join(named + more)}], ready {self.ready_count}, "
                f"in training {len(self._claimed)} of {self._capacity} slots"
            )

    def _add_pending(self, slot: PendingGroup) -> None:
        self._pending[slot.group_id] = slot
        self.index.add_pending(slot)

    def _remove_pending(self, slot: PendingGroup) -> None:
        del self._pending[slot.group_id]
        self.index.remove_pending(slot)

    def _ready_groups(self, draws: Iterable[int]) -> list[PromptGroup]:
        named = list(draws)
        found = [group for group in map(self.index.find_ready, named) if group is not None]
        if len(found) < len(named) or len(set(named)) < len(named):
            raise ValueError(f"draws {sorted(named)} are not all ready, or one is named twice")
        return found

    def _check_free(self, draw: int) -> None:
        if not self.has_room:
            raise ValueError(f"all {self._capacity} slots are taken, none is left for draw {draw}")
        if _group_id(draw) in self._pending or draw in self._claimed or self.index.find_ready(draw) is not None:
            raise ValueError(f"draw {draw} has a slot already")

    def _check_size(self, group_id: str, trajectories: Sequence[Trajectory]) -> None:
        if len(trajectories) != self._group_size:
            raise ValueError(f"{group_id} has {len(trajectories)} of {self._group_size} trajectories")

    def _slot(self, group_id: str) -> PendingGroup:
        if group_id not in self._pending:
            raise ValueError(f"{group_id} is not being generated")
        return self._pending[group_id]


def _group_id(draw: int) -> str:
    return f"draw{draw}"
