"""Look-ups of a replay buffer: its ready and pending groups by draw, start version, target step and age."""

import heapq
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sortedcontainers import SortedDict

from lightning_ppo.batch import Prompt, PromptGroup
from lightning_ppo.rollout.draw_index import DrawIndex


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


class ReplayIndex:
    """What samplers may ask a replay buffer (`buffer.index`); only the buffer itself changes it.

    Groups that are claimed for training are not in it. Every answer is a copy, and takes O(log n) comparisons with n
    groups, plus what it is long.

    Args:
        lock: The buffer's lock; whoever holds it may ask several times about the same state.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._groups: SortedDict = SortedDict()
        self._starts = DrawIndex()
        self._targets = DrawIndex()
        self._oldest = DrawIndex()
        self._pending_starts = DrawIndex()
        self._pending_of_target: Counter[int | None] = Counter()
        self._ready_of_target: Counter[int | None] = Counter()

    def first_ready(self, limit: int, newest_start: int) -> tuple[PromptGroup, ...]:
        """Return up to `limit` ready groups that started at `newest_start` or before, lowest draws first.

        Newer ones are walked over: fast as long as nothing is newer than the version that the trainer asks for.
        """
        with self._lock:
            return tuple(islice((g for g in self._groups.values() if g.start_version <= newest_start), limit))

    def ready_between(self, limit: int, oldest_start: int, newest_start: int) -> tuple[PromptGroup, ...]:
        """Return up to `limit` ready groups with a start version in [oldest_start, newest_start], lowest draws first.

        Takes O(log n) more per start version that occurs in between.
        """
        with self._lock:
            versions = self._starts.keys(oldest_start, newest_start)
            return self._named(islice(heapq.merge(*map(self._starts.of, versions)), limit))

    def ready_of_version(self, limit: int, start_version: int) -> tuple[PromptGroup, ...]:
        """Return up to `limit` ready groups that started at this version, lowest draws first."""
        with self._lock:
            return self._named(islice(self._starts.of(start_version), limit))

    def ready_of_target(self, limit: int, target_step: int) -> tuple[PromptGroup, ...]:
        """Return up to `limit` ready groups stamped for this PPO step, lowest draws first."""
        with self._lock:
            return self._named(islice(self._targets.of(target_step), limit))

    def ready_before_target(self, target_step: int) -> tuple[PromptGroup, ...]:
        """Return the ready groups stamped for an earlier PPO step, earliest step first; unstamped ones never."""
        with self._lock:
            return self._named(self._targets.below(target_step))

    def ready_started_before(self, version: int) -> tuple[PromptGroup, ...]:
        """Return the ready groups with a lower start version, lowest version first."""
        with self._lock:
            return self._named(self._starts.below(version))

    def ready_sampled_before(self, version: int) -> tuple[PromptGroup, ...]:
        """Return the ready groups with a token of a lower version (`PromptGroup.oldest_version`), oldest first."""
        with self._lock:
            return self._named(self._oldest.below(version))

    def ready_versions(self, low: int, high: int) -> tuple[int, ...]:
        """Return the start versions in [low, high] of ready groups, in order."""
        with self._lock:
            return tuple(self._starts.keys(low, high))

    def live_versions(self, low: int, high: int) -> tuple[int, ...]:
        """Return the start versions in [low, high] of ready and pending groups, in order."""
        with self._lock:
            return tuple(sorted({*self._starts.keys(low, high), *self._pending_starts.keys(low, high)}))

    def has_pending_of_version(self, start_version: int) -> bool:
        """Return whether a group that started at this version is being generated."""
        with self._lock:
            return self._pending_starts.has(start_version)

    def find_ready(self, draw: int) -> PromptGroup | None:
        """Return the ready group of a draw, or None."""
        with self._lock:
            return self._groups.get(draw)

    def count_of_target(self, target_step: int | None) -> int:
        """Return how many ready and pending groups are stamped for this PPO step (None: not stamped)."""
        with self._lock:
            return self._ready_of_target[target_step] + self._pending_of_target[target_step]

    def pending_of_target(self, target_step: int | None) -> int:
        """Return how many groups stamped for this PPO step (None: not stamped) are being generated."""
        with self._lock:
            return self._pending_of_target[target_step]

    @property
    def ready_count(self) -> int:
        """Number of ready groups."""
        with self._lock:
            return len(self._groups)

    def ready(self) -> tuple[PromptGroup, ...]:
        """Return every ready group, lowest draw first."""
        with self._lock:
            return tuple(self._groups.values())

    def add_ready(self, group: PromptGroup) -> None:
        """For the buffer only: a group is ready now."""
        self._groups[group.draw] = group
        self._starts.add(group.start_version, group.draw)
        self._oldest.add(group.oldest_version, group.draw)
        _count(self._ready_of_target, group.target_step, 1)
        if group.target_step is not None:
            self._targets.add(group.target_step, group.draw)

    def remove_ready(self, group: PromptGroup) -> None:
        """For the buffer only: a group is no longer ready."""
        del self._groups[group.draw]
        self._starts.remove(group.start_version, group.draw)
        self._oldest.remove(group.oldest_version, group.draw)
        _count(self._ready_of_target, group.target_step, -1)
        if group.target_step is not None:
            self._targets.remove(group.target_step, group.draw)

    def add_pending(self, slot: PendingGroup) -> None:
        """For the buffer only: a group is being generated now."""
        self._pending_starts.add(slot.start_version, slot.draw)
        _count(self._pending_of_target, slot.target_step, 1)

    def remove_pending(self, slot: PendingGroup) -> None:
        """For the buffer only: a group is no longer being generated."""
        self._pending_starts.remove(slot.start_version, slot.draw)
        _count(self._pending_of_target, slot.target_step, -1)

    def _named(self, draws: Iterable[int]) -> tuple[PromptGroup, ...]:
        return tuple(self._groups[draw] for draw in draws)


def _count(counter: Counter[int | None], target: int | None, change: int) -> None:
    counter[target] += change
    # A run passes through any number of steps.
    if counter[target] == 0:
        del counter[target]
