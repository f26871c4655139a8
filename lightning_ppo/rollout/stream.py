"""The endless, seeded sequence of prompts with the ledger of its draws; and the seed of every response."""

import heapq
import random
import threading
from collections.abc import Callable
from typing import Any

from lightning_ppo.errors import CheckpointError, DataError
from lightning_ppo.rollout.ledger import Ledger
from lightning_ppo.seeds import hash_seed

TRAIN = "train"
"""Seed namespace of training; validation and predict use others."""


def sample_seed(run_seed: int, draw: int, index: int, *, namespace: str = TRAIN) -> int:
    """Seed of one response: a stable hash, so that no running generator has to be saved.

    Args:
        run_seed: Seed of the run.
        draw: Position in the prompt stream (validation and predict: the row).
        index: Number of the response within its group.
        namespace: Seeds of different namespaces have nothing in common.

    Returns:
        A whole number in [0, 2**63).
    """
    return hash_seed("response", namespace, run_seed, draw, index)


class PromptStream:
    """Draw numbers 0, 1, 2, ... mapped to rows: every epoch is one pass over all rows. Thread-safe.

    Its ledger keeps the state of every draw. Only trained and skipped draws count for a checkpoint: a resumed stream
    hands out every other draw, in order, exactly once.

    Args:
        num_rows: Rows of the data set.
        seed: Seed of the row order.
        shuffle: A new order in every epoch, which depends on (seed, epoch) only; else file order.
        keep: Rows for which this returns False are passed over; it must not call the stream.

    Raises:
        DataError: `num_rows` is 0.
    """

    def __init__(
        self, num_rows: int, seed: int, shuffle: bool = True, *, keep: Callable[[int], bool] | None = None
    ) -> None:
        if num_rows < 1:
            raise DataError(f"num_rows={num_rows} leaves nothing to draw; give at least one prompt")
        self.ledger = Ledger()
        """States of all draws; whoever dispatches, commits, claims and trains tells it."""
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._keep = keep
        self._orders: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._given_back: list[int] = []
        self._epoch_was_empty = True
        self._empty_epochs = 0

    def row_of(self, draw: int) -> int:
        """Return the row that a draw stands for."""
        epoch, position = divmod(draw, self._num_rows)
        if not self._shuffle:
            return position
        with self._lock:
            return self._row_of(epoch, position)

    def next_draw(self) -> int:
        """Hand out the next draw: those given back first, lowest first, then new ones. It is `DRAWN` from now on.

        Raises:
            DataError: two consecutive epochs hand out nothing, because `keep` keeps no row.
        """
        with self._lock:
            while self._given_back:
                draw = heapq.heappop(self._given_back)
                # `take` may have handed it out meanwhile
                if self.ledger.is_free(draw):
                    self.ledger.draw(draw)
                    return draw
            while True:
                draw = self._next
                epoch, position = divmod(draw, self._num_rows)
                if position == 0 and draw > 0:
                    self._close_epoch(epoch - 1)
                self._next += 1
                if not self.ledger.is_free(draw):
                    self._epoch_was_empty = False
                    continue
                if self._keep is not None and not self._keep(self._row_of(epoch, position)):
                    self.ledger.pass_over(draw)
                    continue
                self._epoch_was_empty = False
                self.ledger.draw(draw)
                return draw

    def take(self, draw: int) -> None:
        """Hand out this very draw, out of order: a restored group needs it. It is `DRAWN` from now on.

        Raises:
            ValueError: it is handed out, trained or skipped already.
        """
        with self._lock:
            self.ledger.draw(draw)

    def give_back(self, draw: int) -> None:
        """Take back a draw that is neither trained nor being trained; `next_draw` hands it out again.

        Raises:
            ValueError: the draw is neither drawn, in flight nor ready.
        """
        with self._lock:
            self.ledger.give_back(draw)
            if draw < self._next:
                heapq.heappush(self._given_back, draw)

    @property
    def cursor(self) -> int:
        """The first draw that is neither trained nor skipped."""
        return self.ledger.cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state, with what the draws were drawn from; plain values."""
        order = {"num_rows": self._num_rows, "seed": self._seed, "shuffle": self._shuffle}
        return self.ledger.state_dict() | order

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the final draws of `state`; what was handed out but not trained is handed out again.

        Raises:
            CheckpointError: the state belongs to another number of rows, seed or shuffle setting, or is malformed;
                nothing changes.
        """
        for name, here in (("num_rows", self._num_rows), ("seed", self._seed), ("shuffle", self._shuffle)):
            if name not in state:
                raise CheckpointError(f"the prompt ledger lacks {name}; resume from an intact checkpoint")
            if state[name] != here:
                raise CheckpointError(
                    f"{name}={here} differs from the checkpoint's {state[name]}; resume with the same prompts and seed"
                )
        with self._lock:
            self.ledger.load_state_dict(state)
            self._next = self.ledger.cursor
            self._given_back = []
            # What lies before the cursor was handed out in the earlier run, also when an epoch ends exactly there.
            self._epoch_was_empty = self._next == 0
            self._empty_epochs = 0

    def _close_epoch(self, epoch: int) -> None:
        self._empty_epochs = self._empty_epochs + 1 if self._epoch_was_empty else 0
        self._epoch_was_empty = True
        if self._empty_epochs >= 2:
            raise DataError(
                f"epochs {epoch - 1} and {epoch} handed out no prompt: the row filter keeps none of {self._num_rows} "
                "rows; let it keep some"
            )

    def _row_of(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(self._num_rows))
            random.Random(hash_seed("epoch", self._seed, epoch)).shuffle(order)
            # Draws of neighbouring epochs are asked for together; older orders can be made again.
            while len(self._orders) >= 3:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order
        return order[position]
