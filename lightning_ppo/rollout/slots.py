"""The way of a draw from its dispatch to its commit: buffer and ledger change together, as snapshots need it."""

from collections.abc import Sequence

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.replay import PendingGroup, ReplayBuffer
from lightning_ppo.rollout.stream import PromptStream


class Slots:
    """Takes and frees slots of the buffer; every method is one change to whoever holds the buffer's lock.

    Args:
        buffer: Where groups go.
        prompts: The data set.
        stream: Which prompt is next, and what became of each.
    """

    def __init__(self, buffer: ReplayBuffer, prompts: PromptSet, stream: PromptStream) -> None:
        self._buffer = buffer
        self._prompts = prompts
        self._stream = stream

    def draw(self, draw: int | None) -> int:
        """Hand out this very draw, or the next one."""
        if draw is None:
            return self._stream.next_draw()
        self._stream.take(draw)
        return draw

    def reserve(self, draw: int, version: int, target_step: int | None) -> PendingGroup:
        """Give a draw that was handed out its slot."""
        with self._buffer.changed:
            prompt = self._prompts[self._stream.row_of(draw)]
            slot = self._buffer.reserve(draw, prompt, version, target_step)
            self._stream.ledger.dispatch(draw)
            return slot

    def fill(self, group: PromptGroup) -> None:
        """Give a draw that was handed out its slot, with a group that an earlier run finished."""
        with self._buffer.changed:
            self._stream.ledger.dispatch(group.draw)
            self._stream.ledger.finish(group.draw)
            self._buffer.restore(group)

    def commit(self, slot: PendingGroup, trajectories: Sequence[Trajectory], version: int) -> PromptGroup:
        """Make a pending group ready."""
        with self._buffer.changed:
            group = self._buffer.commit(slot.group_id, trajectories, version)
            self._stream.ledger.finish(slot.draw)
            return group

    def restart(self, slot: PendingGroup, version: int) -> PendingGroup:
        """Have a pending group generated from the start."""
        with self._buffer.changed:
            again = self._buffer.regenerate(slot.draw, version)
            self._stream.ledger.regenerate(slot.draw)
            return again

    def skip(self, slot: PendingGroup, reason: str) -> None:
        """Give a pending group's prompt up for good."""
        with self._buffer.changed:
            self._buffer.remove(slot.group_id)
            self._stream.ledger.skip(slot.draw, reason)

    def give_up(self, slot: PendingGroup) -> None:
        """Hand a pending group's draw out again; what failed after its commit, or its skip, has come to its end."""
        with self._buffer.changed:
            if self._buffer.is_pending(slot.draw):
                self._buffer.remove(slot.group_id)
                self._stream.give_back(slot.draw)
