import io
import threading
from typing import Any

import pytest
import torch
from draws import train
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.ledger import DrawState, Ledger

STATES = list(DrawState)
MOVES: dict[str, Any] = {
    "draw": lambda ledger: ledger.draw(0),
    "pass_over": lambda ledger: ledger.pass_over(0),
    "dispatch": lambda ledger: ledger.dispatch(0),
    "finish": lambda ledger: ledger.finish(0),
    "claim": lambda ledger: ledger.claim([0]),
    "train": lambda ledger: ledger.train([0]),
    "regenerate": lambda ledger: ledger.regenerate(0),
    "give_back": lambda ledger: ledger.give_back(0),
    "skip": lambda ledger: ledger.skip(0, "why"),
}
# state of draw 0 -> the moves that are legal in it, with the state they lead to
TABLE: dict[str | None, dict[str, str | None]] = {
    None: {"draw": "drawn", "pass_over": "trained"},
    "drawn": {"dispatch": "in_flight", "give_back": None, "skip": "skipped"},
    "in_flight": {"finish": "ready", "regenerate": "in_flight", "give_back": None, "skip": "skipped"},
    "ready": {"claim": "claimed", "regenerate": "in_flight", "give_back": None},
    "claimed": {"train": "trained"},
    "trained": {},
    "skipped": {},
}
WAY: dict[str | None, tuple[str, ...]] = {
    None: (),
    "drawn": ("draw",),
    "in_flight": ("draw", "dispatch"),
    "ready": ("draw", "dispatch", "finish"),
    "claimed": ("draw", "dispatch", "finish", "claim"),
    "trained": ("draw", "dispatch", "finish", "claim", "train"),
    "skipped": ("draw", "skip"),
}


def at(state: str | None) -> Ledger:
    ledger = Ledger()
    for move in WAY[state]:
        MOVES[move](ledger)
    return ledger


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", TABLE)
def test_every_move_from_every_state(state: str | None, move: str) -> None:
    ledger = at(state)
    assert ledger.state(0) == state
    before, counts = ledger.state_dict(), ledger.counts()
    if move in TABLE[state]:
        MOVES[move](ledger)
        assert ledger.state(0) == TABLE[state][move]
    else:
        with pytest.raises(ValueError, match="draw"):
            MOVES[move](ledger)
        assert (ledger.state(0), ledger.state_dict(), ledger.counts()) == (state, before, counts)


@pytest.mark.parametrize("draws", [[0, 1], [1, 0], [0, 0], [0, 7]])
def test_a_move_of_several_draws_is_all_or_nothing(draws: list[int]) -> None:
    ledger = at("ready")
    ledger.draw(1)
    before = ledger.counts()
    with pytest.raises(ValueError, match="cannot become claimed"):
        ledger.claim(draws)
    assert ledger.counts() == before


def test_a_skip_needs_a_reason() -> None:
    ledger = at("drawn")
    with pytest.raises(ValueError, match="without a reason"):
        ledger.skip(0, "")
    assert ledger.state(0) == "drawn"


def test_memory_stays_bounded_over_a_long_run() -> None:
    ledger = Ledger()
    for draw in range(20_000):
        ledger.draw(draw)
        ledger.dispatch(draw)
        if draw % 1000 == 0:
            ledger.skip(draw, "bad row")
            continue
        ledger.finish(draw)
        ledger.claim([draw])
        ledger.train([draw])
    assert ledger.cursor == 20_000
    assert not ledger._states
    assert len(ledger.skipped) == 20
    assert ledger.counts() == dict.fromkeys(STATES, 0) | {"trained": 19_980, "skipped": 20}
    assert [ledger.state(draw) for draw in (0, 1, 19_000)] == ["skipped", "trained", "skipped"]


def test_state_is_plain_and_loads_with_weights_only() -> None:
    ledger = at("trained")
    for draw in (1, 2, 3, 4):
        ledger.draw(draw)
    ledger.skip(2, "reward is nan")
    train(ledger, [4])
    file = io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state == {"cursor": 1, "trained": [4], "skipped": [[2, "reward is nan"]], "num_trained": 2}
    again = Ledger()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [again.state(draw) for draw in range(6)] == ["trained", None, "skipped", None, "trained", None]
    assert [again.is_free(draw) for draw in range(6)] == [False, True, False, True, False, True]
    assert [again.is_done(draw) for draw in range(6)] == [True, False, True, False, True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": -1},
        {"cursor": "3"},
        {"cursor": True},
        {"trained": [4, 4]},
        {"trained": [1]},
        {"trained": None},
        {"trained": [4.0]},
        {"skipped": [[4, "why"]]},
        {"skipped": [[5, ""]]},
        {"skipped": [5]},
        {"skipped": [[5, "a"], [5, "b"]]},
        {"num_trained": -2},
        {"num_trained": None},
    ],
)
def test_a_malformed_state_is_refused_in_one_line_and_nothing_changes(change: dict[str, Any]) -> None:
    ledger = at("claimed")
    before = ledger.counts()
    with pytest.raises(CheckpointError, match="resume from an intact checkpoint") as caught:
        ledger.load_state_dict({"cursor": 3, "trained": [4], "skipped": [], "num_trained": 4} | change)
    assert "\n" not in str(caught.value)
    assert (ledger.counts(), ledger.state(0)) == (before, "claimed")


def test_threads_lose_no_transition() -> None:
    ledger = Ledger()
    for draw in range(800):
        ledger.draw(draw)
        ledger.dispatch(draw)

    def work(start: int) -> None:
        for draw in range(start, 800, 4):
            ledger.finish(draw)
            ledger.claim([draw])
            ledger.train([draw])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ledger.cursor == 800
    assert ledger.counts()["trained"] == 800


class Walk(RuleBasedStateMachine):
    """Random legal and illegal moves against a plain dict; a reload at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[int, str] = {}

    @rule(draw=st.integers(0, 7), move=st.sampled_from(sorted(MOVES.keys() - {"pass_over"})))
    def step(self, draw: int, move: str) -> None:
        calls: dict[str, Any] = {
            "claim": lambda: self.ledger.claim([draw]),
            "train": lambda: self.ledger.train([draw]),
            "skip": lambda: self.ledger.skip(draw, "why"),
        }
        call = calls.get(move, lambda: getattr(self.ledger, move)(draw))
        legal = TABLE[self.model.get(draw)]
        if move not in legal:
            with pytest.raises(ValueError, match=f"draw {draw}|draws"):
                call()
            return
        call()
        new = legal[move]
        if new is None:
            del self.model[draw]
        else:
            self.model[draw] = new

    @precondition(lambda self: self.model)
    @rule()
    def resume(self) -> None:
        state = self.ledger.state_dict()
        self.ledger = Ledger()
        self.ledger.load_state_dict(state)
        self.model = {draw: state for draw, state in self.model.items() if state in ("trained", "skipped")}

    @invariant()
    def agrees(self) -> None:
        assert {draw: self.ledger.state(draw) for draw in range(8)} == {draw: self.model.get(draw) for draw in range(8)}
        done = {draw for draw, state in self.model.items() if state in ("trained", "skipped")}
        assert self.ledger.cursor == next(draw for draw in range(9) if draw not in done)
        for state, count in self.ledger.counts().items():
            assert count == sum(value == state for value in self.model.values())
        assert all(draw >= self.ledger.cursor for draw in self.ledger._states)


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWalk = Walk.TestCase
