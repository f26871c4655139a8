"""The ledger: in which state every drawn prompt is, so that each is trained exactly once or skipped with a reason."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from lightning_ppo.errors import CheckpointError
from lightning_ppo.validation import is_count


class DrawState(StrEnum):
    """State of a drawn prompt. The last two are final."""

    DRAWN = "drawn"
    """Handed out, waits for its dispatch."""
    IN_FLIGHT = "in_flight"
    """Being generated."""
    READY = "ready"
    """Finished, waits in the buffer."""
    CLAIMED = "claimed"
    """Being trained."""
    TRAINED = "trained"
    SKIPPED = "skipped"


_FINAL = frozenset({DrawState.TRAINED, DrawState.SKIPPED})


class Ledger:
    """States of all draws. Thread-safe; an illegal move raises `ValueError` and changes nothing.

    Memory does not grow with the run: only draws from the cursor on are held, trained prefixes fold into the cursor.
    What is kept for ever are the skipped draws, which the drop budgets bound.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cursor = 0
        self._states: dict[int, DrawState | None] = {}
        """Draws from the cursor on; None: passed over, stands for no prompt."""
        self._skipped: dict[int, str] = {}
        self._counts: Counter[DrawState] = Counter()

    def draw(self, draw: int) -> None:
        """Record that a draw was handed out; again, if it was given back.

        Raises:
            ValueError: it is handed out, trained or skipped already.
        """
        with self._lock:
            if draw < self._cursor or draw in self._states:
                raise ValueError(f"draw {draw} cannot be handed out: it is {self._name(draw)} already")
            self._set(draw, DrawState.DRAWN)

    def pass_over(self, draw: int) -> None:
        """Record that a draw stands for no prompt: the cursor moves over it, nothing else ever sees it.

        Raises:
            ValueError: it is handed out, trained or skipped already.
        """
        with self._lock:
            if draw < self._cursor or draw in self._states:
                raise ValueError(f"draw {draw} cannot be passed over: it is {self._name(draw)} already")
            self._states[draw] = None
            self._fold()

    def dispatch(self, draw: int) -> None:
        """A drawn prompt is being generated from now on.

        Raises:
            ValueError: the draw is not drawn.
        """
        self._move([draw], {DrawState.DRAWN}, DrawState.IN_FLIGHT)

    def finish(self, draw: int) -> None:
        """All responses of a prompt in flight are committed.

        Raises:
            ValueError: the draw is not in flight.
        """
        self._move([draw], {DrawState.IN_FLIGHT}, DrawState.READY)

    def claim(self, draws: Iterable[int]) -> None:
        """Ready groups go to training.

        Raises:
            ValueError: a draw is not ready, or named twice.
        """
        self._move(draws, {DrawState.READY}, DrawState.CLAIMED)

    def train(self, draws: Iterable[int]) -> None:
        """Claimed groups were trained; the cursor moves over every trained prefix.

        Raises:
            ValueError: a draw is not claimed, or named twice.
        """
        self._move(draws, {DrawState.CLAIMED}, DrawState.TRAINED)

    def regenerate(self, draw: int) -> None:
        """A group is generated again in its place.

        Raises:
            ValueError: the draw is neither ready nor in flight.
        """
        self._move([draw], {DrawState.READY, DrawState.IN_FLIGHT}, DrawState.IN_FLIGHT)

    def give_back(self, draw: int) -> None:
        """Forget a draw that nobody works on any more, so that it can be handed out again.

        Raises:
            ValueError: the draw is neither drawn, in flight nor ready.
        """
        with self._lock:
            self._check([draw], {DrawState.DRAWN, DrawState.IN_FLIGHT, DrawState.READY}, "given back")
            old = self._states.pop(draw)
            if old is not None:
                self._counts[old] -= 1

    def skip(self, draw: int, reason: str) -> None:
        """Give a prompt up for good.

        Args:
            draw: A draw that is drawn or in flight.
            reason: Why, one line; kept for the whole run.

        Raises:
            ValueError: the draw is neither drawn nor in flight, or the reason is empty.
        """
        if not reason:
            raise ValueError(f"draw {draw} is skipped without a reason")
        with self._lock:
            self._check([draw], {DrawState.DRAWN, DrawState.IN_FLIGHT}, DrawState.SKIPPED)
            self._skipped[draw] = reason
            self._set(draw, DrawState.SKIPPED)
            self._fold()

    def state(self, draw: int) -> DrawState | None:
        """Return a draw's state; None if it was never handed out, was given back, or was passed over.

        Below the cursor, draws that were passed over are not told from trained ones.
        """
        with self._lock:
            return self._state(draw)

    def is_done(self, draw: int) -> bool:
        """Whether a draw was trained, skipped or passed over."""
        with self._lock:
            return draw < self._cursor or (draw in self._states and self._states[draw] in (*_FINAL, None))

    def is_free(self, draw: int) -> bool:
        """Whether a draw can be handed out."""
        with self._lock:
            return draw >= self._cursor and draw not in self._states

    @property
    def cursor(self) -> int:
        """The first draw that is neither trained nor skipped."""
        with self._lock:
            return self._cursor

    def counts(self) -> dict[str, int]:
        """Return the number of draws in each state; trained and skipped ones over the whole run."""
        with self._lock:
            return {state.value: self._counts[state] for state in DrawState}

    @property
    def skipped(self) -> Mapping[int, str]:
        """Draws that were given up, with the reasons."""
        with self._lock:
            return dict(self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return what is final; plain values. Everything else is drawn again by a resumed run."""
        with self._lock:
            return {
                "cursor": self._cursor,
                "trained": sorted(draw for draw, state in self._states.items() if state is DrawState.TRAINED),
                "skipped": [[draw, reason] for draw, reason in sorted(self._skipped.items())],
                "num_trained": self._counts[DrawState.TRAINED],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was final in `state`; states without `skipped` and `num_trained` are fine too.

        Raises:
            CheckpointError: a key is missing, a value is malformed, or a draw stands there twice; nothing changes.
        """
        cursor, trained, skipped, num_trained = _parsed(state)
        with self._lock:
            self._cursor = cursor
            self._skipped = skipped
            self._states = dict.fromkeys(trained, DrawState.TRAINED)
            self._states |= {draw: DrawState.SKIPPED for draw in skipped if draw >= cursor}
            self._counts = Counter({DrawState.TRAINED: num_trained, DrawState.SKIPPED: len(skipped)})
            self._fold()

    def _move(self, draws: Iterable[int], sources: set[DrawState], target: DrawState) -> None:
        chosen = list(draws)
        with self._lock:
            self._check(chosen, sources, target)
            for draw in chosen:
                self._set(draw, target)
            if target in _FINAL:
                self._fold()

    def _check(self, draws: list[int], sources: set[DrawState], target: str) -> None:
        if len(set(draws)) != len(draws):
            raise ValueError(f"draws {sorted(draws)} cannot become {target}: one stands there twice")
        for draw in draws:
            if self._state(draw) not in sources:
                raise ValueError(f"draw {draw} cannot become {target}: it is {self._name(draw)}")

    def _set(self, draw: int, state: DrawState) -> None:
        old = self._states.get(draw)
        if old is not None:
            self._counts[old] -= 1
        self._states[draw] = state
        self._counts[state] += 1

    def _fold(self) -> None:
        while self._cursor in self._states and self._states[self._cursor] in (*_FINAL, None):
            del self._states[self._cursor]
            self._cursor += 1

    def _state(self, draw: int) -> DrawState | None:
        if 0 <= draw < self._cursor:
            return DrawState.SKIPPED if draw in self._skipped else DrawState.TRAINED
        return self._states.get(draw)

    def _name(self, draw: int) -> str:
        state = self._state(draw)
        if state is not None:
            return state.value
        return "passed over" if draw in self._states else "not handed out"


def _parsed(state: Mapping[str, Any]) -> tuple[int, list[int], dict[int, str], int]:
    """Check a state dict and return cursor, trained draws beyond it, skipped draws, and the number of trained draws."""
    try:
        cursor, trained = state["cursor"], list(state["trained"])
        pairs = [(draw, reason) for draw, reason in state.get("skipped", ())]
        num_trained = state.get("num_trained", cursor + len(trained))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the prompt ledger is malformed ({error!r}); resume from an intact checkpoint"
        ) from error
    numbers = [cursor, num_trained, *trained, *(draw for draw, _ in pairs)]
    if not all(is_count(number, 0) for number in numbers):
        raise CheckpointError("the prompt ledger has a draw that is no whole number; resume from an intact checkpoint")
    if not all(isinstance(reason, str) and reason for _, reason in pairs):
        raise CheckpointError("the prompt ledger has a skipped draw without reason; resume from an intact checkpoint")
    known = [*trained, *(draw for draw, _ in pairs)]
    if len(set(known)) != len(known) or any(draw < cursor for draw in trained):
        raise CheckpointError("the prompt ledger names a trained draw twice; resume from an intact checkpoint")
    return cursor, trained, dict(pairs), num_trained
