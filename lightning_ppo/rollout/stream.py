"""The endless, seeded sequence of prompts, with a ledger of what was trained; and the seed of every response."""

import hashlib
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from lightning_ppo.errors import CheckpointError, DataError

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
    return _hash(f"response\0{namespace}\0{run_seed}\0{draw}\0{index}")


class PromptStream:
    """Draw numbers 0, 1, 2, ... mapped to rows: every epoch is one pass over all rows. Thread-safe.

    A draw is first handed out (generation starts), later trained. Only trained draws count for a checkpoint: a resumed
    stream hands out every untrained draw, in order, exactly once.

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
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._keep = keep
        self._orders: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._cursor = 0
        self._trained: set[int] = set()
        self._passed_over: set[int] = set()
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
        """Hand out the next draw that was neither handed out nor trained yet.

        Raises:
            DataError: two consecutive epochs hand out nothing, because `keep` keeps no row.
        """
        with self._lock:
            while True:
                draw = self._next
                epoch, position = divmod(draw, self._num_rows)
                if position == 0 and draw > 0:
                    self._close_epoch(epoch - 1)
                self._next += 1
                if draw in self._trained:
                    self._epoch_was_empty = False
                    continue
                if self._keep is not None and not self._keep(self._row_of(epoch, position)):
                    self._passed_over.add(draw)
                    continue
                self._epoch_was_empty = False
                return draw

    def mark_trained(self, draws: Iterable[int]) -> None:
        """Record draws as trained; the cursor moves over every trained prefix.

        Raises:
            ValueError: a draw was not handed out, or is trained already; nothing is recorded then.
        """
        with self._lock:
            new: set[int] = set()
            for draw in draws:
                known = draw in new or draw in self._trained or draw in self._passed_over
                if known or not self._cursor <= draw < self._next:
                    raise ValueError(f"draw {draw} is trained already or was never handed out")
                new.add(draw)
            self._trained.update(new)
            while self._cursor in self._trained or self._cursor in self._passed_over:
                self._trained.discard(self._cursor)
                self._passed_over.discard(self._cursor)
                self._cursor += 1

    @property
    def cursor(self) -> int:
        """The first untrained draw."""
        with self._lock:
            return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and the trained draws beyond it, with what they were drawn from; plain values."""
        with self._lock:
            return {
                "cursor": self._cursor,
                "trained": sorted(self._trained),
                "num_rows": self._num_rows,
                "seed": self._seed,
                "shuffle": self._shuffle,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the trained draws of `state`; what was handed out but not trained is handed out again.

        Raises:
            CheckpointError: the state belongs to another number of rows, seed or shuffle setting.
        """
        for name, here in (("num_rows", self._num_rows), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != here:
                raise CheckpointError(
                    f"{name}={here} differs from the checkpoint's {state[name]}; resume with the same prompts and seed"
                )
        with self._lock:
            self._cursor = self._next = int(state["cursor"])
            self._trained = {int(draw) for draw in state["trained"]}
            self._passed_over = set()
            # The part of this epoch before the cursor was handed out in the earlier run.
            self._epoch_was_empty = self._cursor % self._num_rows == 0
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
            random.Random(_hash(f"epoch\0{self._seed}\0{epoch}")).shuffle(order)
            # Draws of neighbouring epochs are asked for together; older orders can be made again.
            while len(self._orders) >= 3:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order
        return order[position]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
