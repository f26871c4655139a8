import random
import subprocess
import sys
from collections import Counter

import pytest
from draws import train
from hypothesis import given
from hypothesis import strategies as st

from lightning_ppo.errors import CheckpointError, DataError
from lightning_ppo.rollout.stream import PromptStream, sample_seed


def take(stream: PromptStream, count: int) -> list[int]:
    return [stream.next_draw() for _ in range(count)]


def test_every_epoch_is_a_new_permutation_of_all_rows() -> None:
    stream = PromptStream(11, seed=3)
    epochs = [[stream.row_of(draw) for draw in range(11 * e, 11 * e + 11)] for e in range(4)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [stream.row_of(draw) for draw in range(11)] == epochs[0], "an order that was forgotten is made again"


def test_order_depends_on_the_seed_only() -> None:
    one, same, other = (PromptStream(9, seed) for seed in (1, 1, 2))
    backwards = [same.row_of(draw) for draw in reversed(range(50))][::-1]
    assert [one.row_of(draw) for draw in range(50)] == backwards
    assert [other.row_of(draw) for draw in range(9)] != backwards[:9]


def test_without_shuffle_rows_come_in_file_order() -> None:
    stream = PromptStream(3, seed=1, shuffle=False)
    assert [stream.row_of(draw) for draw in take(stream, 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_order_and_seeds_are_the_same_in_another_process() -> None:
    code = (
        "from lightning_ppo.rollout.stream import PromptStream, sample_seed;"
        "s = PromptStream(20, 5); print([s.row_of(d) for d in range(45)], sample_seed(5, 6, 7))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    stream = PromptStream(20, 5)
    assert out.strip() == f"{[stream.row_of(d) for d in range(45)]} {sample_seed(5, 6, 7)}"


# Pitfall 95: the order over two epochs, interrupted anywhere, equals the uninterrupted one; an epoch boundary included.
@pytest.mark.parametrize("stop", range(0, 15))
def test_interrupted_order_equals_the_uninterrupted_one(stop: int) -> None:
    whole = PromptStream(7, seed=4)
    expected = [whole.row_of(draw) for draw in take(whole, 14)]
    first = PromptStream(7, seed=4)
    rows = [first.row_of(draw) for draw in take(first, min(stop + 3, 14))][:stop]
    train(first.ledger, range(stop))
    second = PromptStream(7, seed=4)
    second.load_state_dict(first.state_dict())
    assert second.cursor == stop
    assert rows + [second.row_of(draw) for draw in take(second, 14 - stop)] == expected


@given(st.integers(1, 9), st.integers(0, 40), st.data())
def test_a_resume_hands_out_every_untrained_draw_once_in_order(num_rows: int, handed: int, data: st.DataObject) -> None:
    stream = PromptStream(num_rows, seed=0)
    draws = take(stream, handed)
    trained = data.draw(st.sets(st.sampled_from(draws))) if draws else set()
    order = list(trained)
    random.Random(0).shuffle(order)
    for draw in order:
        train(stream.ledger, [draw])
    untrained = [draw for draw in range(handed + 10) if draw not in trained]
    state = stream.state_dict()
    assert state["cursor"] == untrained[0] == stream.cursor
    assert all(draw > state["cursor"] for draw in state["trained"])
    resumed = PromptStream(num_rows, seed=0)
    resumed.load_state_dict(state)
    assert take(resumed, len(untrained)) == untrained


def test_state_is_plain_and_shared_with_nothing() -> None:
    stream = PromptStream(5, seed=0)
    take(stream, 4)
    train(stream.ledger, [0, 2])
    state = stream.state_dict()
    assert state == {
        "cursor": 1,
        "trained": [2],
        "skipped": [],
        "num_trained": 2,
        "num_rows": 5,
        "seed": 0,
        "shuffle": True,
    }
    train(stream.ledger, [1, 3])
    assert state["trained"] == [2]


@pytest.mark.parametrize("draws", [[5], [0], [2], [1, 1], [1, 9]])
def test_draws_that_cannot_be_trained_are_refused_and_nothing_is_recorded(draws: list[int]) -> None:
    stream = PromptStream(5, seed=0)
    train(stream.ledger, take(stream, 4)[::2])
    for draw in (1, 3):
        stream.ledger.dispatch(draw)
        stream.ledger.finish(draw)
    stream.ledger.claim([1, 3])
    before = stream.state_dict()
    with pytest.raises(ValueError, match="cannot become trained"):
        stream.ledger.train(draws)
    assert stream.state_dict() == before


@pytest.mark.parametrize(("num_rows", "seed", "shuffle"), [(6, 0, True), (5, 1, True), (5, 0, False)])
def test_state_of_another_order_is_refused(num_rows: int, seed: int, shuffle: bool) -> None:
    state = PromptStream(5, seed=0).state_dict()
    with pytest.raises(CheckpointError, match="differs from the checkpoint"):
        PromptStream(num_rows, seed, shuffle).load_state_dict(state)


def test_rows_that_are_not_kept_are_passed_over_by_the_cursor_too() -> None:
    stream = PromptStream(4, seed=0, shuffle=False, keep=lambda row: row % 2 == 1)
    draws = take(stream, 4)
    assert draws == [1, 3, 5, 7]
    train(stream.ledger, [1, 3])
    assert stream.cursor == 5
    resumed = PromptStream(4, seed=0, shuffle=False, keep=lambda row: row % 2 == 1)
    resumed.load_state_dict(stream.state_dict())
    assert take(resumed, 2) == [5, 7]


def test_two_empty_epochs_fail_instead_of_searching_for_ever() -> None:
    asked: Counter[int] = Counter()

    def nothing(row: int) -> bool:
        asked[row] += 1
        return False

    stream = PromptStream(3, seed=0, keep=nothing)
    with pytest.raises(DataError, match="epochs 0 and 1 handed out no prompt"):
        stream.next_draw()
    assert asked == {0: 2, 1: 2, 2: 2}


def test_one_empty_epoch_is_forgiven() -> None:
    kept = {0: True}
    stream = PromptStream(2, seed=0, shuffle=False, keep=lambda row: kept[0])
    assert take(stream, 2) == [0, 1]
    calls = iter([False, False, True, False, False, True])
    stream = PromptStream(2, seed=0, shuffle=False, keep=lambda row: next(calls))
    assert take(stream, 2) == [2, 5]


# Pitfalls 79, 94 and 103: right after a resume at the very end of an epoch, that epoch hands out nothing any more.
@pytest.mark.parametrize("trained", [2, 3, 4])
def test_an_epoch_that_was_handed_out_before_the_resume_is_not_empty(trained: int) -> None:
    first = PromptStream(4, seed=0, shuffle=False)
    train(first.ledger, take(first, trained))
    rest_of_epoch = (4 - trained) % 4
    answers = iter([False] * (rest_of_epoch + 4) + [True])
    resumed = PromptStream(4, seed=0, shuffle=False, keep=lambda row: next(answers))
    resumed.load_state_dict(first.state_dict())
    assert resumed.next_draw() == 8


def test_a_resume_does_not_switch_the_guard_off() -> None:
    first = PromptStream(4, seed=0)
    train(first.ledger, take(first, 4))
    resumed = PromptStream(4, seed=0, keep=lambda row: False)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="epochs 1 and 2 handed out no prompt"):
        resumed.next_draw()


def test_draws_given_back_come_first_lowest_first() -> None:
    stream = PromptStream(3, seed=0)
    take(stream, 6)
    for draw in (4, 1, 3):
        stream.give_back(draw)
    assert stream.ledger.state(1) is None
    assert take(stream, 5) == [1, 3, 4, 6, 7]
    assert stream.ledger.state(1) == "drawn"


def test_a_draw_is_given_back_once_and_only_while_it_is_open() -> None:
    stream = PromptStream(3, seed=0)
    take(stream, 2)
    train(stream.ledger, [0])
    stream.give_back(1)
    for draw in (0, 1, 2):
        with pytest.raises(ValueError, match=f"draw {draw} cannot become given back"):
            stream.give_back(draw)
    assert take(stream, 2) == [1, 2]


def test_draws_taken_out_of_order_are_handed_out_once() -> None:
    stream = PromptStream(3, seed=0)
    stream.take(2)
    stream.take(5)
    train(stream.ledger, [2])
    assert take(stream, 3) == [0, 1, 3]
    with pytest.raises(ValueError, match="draw 5 cannot be handed out: it is drawn already"):
        stream.take(5)
    stream.give_back(5)
    stream.take(5)
    stream.give_back(5)
    stream.give_back(3)
    stream.take(3)
    assert take(stream, 3) == [4, 5, 6]
    assert stream.cursor == 0


def test_skipped_draws_stay_skipped_over_a_resume() -> None:
    first = PromptStream(3, seed=0)
    take(first, 5)
    first.ledger.skip(1, "reward raised")
    first.ledger.skip(4, "timed out")
    train(first.ledger, [0])
    assert first.cursor == 2
    resumed = PromptStream(3, seed=0)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 3) == [2, 3, 5]
    assert resumed.ledger.skipped == {1: "reward raised", 4: "timed out"}


def test_a_state_of_an_older_version_loads() -> None:
    stream = PromptStream(5, seed=0)
    stream.load_state_dict({"cursor": 1, "trained": [2], "num_rows": 5, "seed": 0, "shuffle": True})
    assert take(stream, 3) == [1, 3, 4]
    assert stream.ledger.counts()["trained"] == 2


@pytest.mark.parametrize("key", ["cursor", "trained", "num_rows", "seed", "shuffle"])
def test_a_state_without_a_key_is_refused_and_nothing_changes(key: str) -> None:
    stream = PromptStream(5, seed=0)
    train(stream.ledger, take(stream, 2))
    state = PromptStream(5, seed=0).state_dict()
    del state[key]
    before = stream.state_dict()
    with pytest.raises(CheckpointError, match=key) as caught:
        stream.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert stream.state_dict() == before


def test_no_rows() -> None:
    with pytest.raises(DataError, match="num_rows=0"):
        PromptStream(0, seed=0)


def test_seeds_are_distinct_in_range_and_kept_apart_by_namespace() -> None:
    seeds = {sample_seed(run, draw, index) for run in range(3) for draw in range(30) for index in range(12)}
    validation = {sample_seed(0, draw, index, namespace="validate") for draw in range(30) for index in range(12)}
    assert len(seeds) == 3 * 30 * 12
    assert not seeds & validation
    assert all(0 <= seed < 2**63 for seed in seeds | validation)
    assert sample_seed(0, 1, 11) != sample_seed(0, 11, 1)


def test_seed_is_pinned() -> None:
    # A checkpoint of an older version must still replay.
    assert sample_seed(1234, 5, 6) == PINNED_SEED
    assert [PromptStream(6, 1234).row_of(draw) for draw in range(6)] == PINNED_ORDER


PINNED_SEED = 486370065712887274
PINNED_ORDER = [0, 2, 1, 5, 3, 4]
