import threading

import pytest

from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.testing import make_group, make_prompt, make_trajectory


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def buffer(clock: Clock) -> ReplayBuffer:
    return ReplayBuffer(capacity=4, group_size=2, clock=clock)


def fill(buffer: ReplayBuffer, *draws: int, commit: bool = True) -> None:
    for draw in draws:
        group_id = buffer.reserve(draw, make_prompt(row=draw), version=draw // 2, target_step=draw // 2).group_id
        if commit:
            buffer.commit(group_id, [make_trajectory()] * 2, end_version=7)


def ready(buffer: ReplayBuffer) -> list[int]:
    return [group.draw for group in buffer.ready()]


def test_a_group_carries_what_was_stamped(buffer: ReplayBuffer, clock: Clock) -> None:
    prompt = make_prompt(row=9)
    group_id = buffer.reserve(5, prompt, version=3, target_step=4).group_id
    assert [(slot.draw, slot.start_version, slot.target_step) for slot in buffer.pending()] == [(5, 3, 4)]
    assert buffer.ready() == ()
    clock.now += 2.5
    rows = [make_trajectory("a"), make_trajectory("b")]
    buffer.commit(group_id, rows, end_version=6)
    (group,) = buffer.ready()
    assert (group.group_id, group.draw, group.prompt) == (group_id, 5, prompt)
    assert (group.start_version, group.end_version, group.target_step) == (3, 6, 4)
    assert group.trajectories == tuple(rows)
    assert group.generation_s == 2.5
    assert buffer.pending() == ()


def test_ready_groups_stand_in_dispatch_order_whatever_finishes_first(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2, commit=False)
    for draw in (2, 0, 1):
        buffer.commit(f"draw{draw}", [make_trajectory()] * 2, end_version=0)
        assert ready(buffer) == sorted(ready(buffer))
    assert ready(buffer) == [0, 1, 2]


def snapshot(buffer: ReplayBuffer) -> tuple:
    index = buffer.index
    looked_up = (
        index.ready_between(9, 0, 9),
        index.ready_started_before(99),
        index.ready_sampled_before(99),
        index.ready_before_target(99),
        index.live_versions(0, 99),
        [index.count_of_target(step) for step in (None, *range(5))],
    )
    return looked_up, buffer.pending(), buffer.ready(), buffer.claimed(), buffer.occupied


def test_errors_leave_everything_as_it_was(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1)
    fill(buffer, 2, commit=False)
    group0, group1 = buffer.ready()
    buffer.claim([group0])
    before = snapshot(buffer)
    mistakes = [
        lambda: buffer.commit("draw9", [make_trajectory()] * 2, 0),
        lambda: buffer.commit("draw1", [make_trajectory()] * 2, 0),
        lambda: buffer.commit("draw2", [make_trajectory()], 0),
        lambda: buffer.commit("draw2", [make_trajectory()] * 3, 0),
        lambda: buffer.remove("draw1"),
        lambda: buffer.claim([group1, group0]),
        lambda: buffer.release([0, 1]),
        lambda: buffer.remove("draw9"),
        lambda: buffer.claim([group1, group1]),
        lambda: buffer.regenerate(0, 9),
        lambda: buffer.regenerate(9, 9),
        lambda: buffer.give_back([1, 2]),
        lambda: buffer.give_back([1, 0]),
        lambda: buffer.give_back([1, 1]),
        lambda: buffer.restore(make_group(0, size=2)),
        lambda: buffer.restore(make_group(1, size=2)),
        lambda: buffer.restore(make_group(2, size=2)),
        lambda: buffer.restore(make_group(3, size=1)),
        lambda: buffer.reserve(2, make_prompt(), 0, None),
        lambda: buffer.reserve(0, make_prompt(), 0, None),
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError, match="draw"):
            mistake()
        assert snapshot(buffer) == before


def test_a_slot_is_held_until_release_or_removal(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2)
    fill(buffer, 3, commit=False)
    assert not buffer.has_room
    with pytest.raises(ValueError, match="all 4 slots are taken"):
        buffer.reserve(4, make_prompt(), 0, None)
    buffer.remove("draw3")
    assert buffer.occupied == 3
    buffer.claim(buffer.ready()[:2])
    assert buffer.occupied == 3, "claimed groups keep their slots"
    assert [group.draw for group in buffer.claimed()] == [0, 1]
    buffer.release([0, 1])
    assert buffer.occupied == 1
    assert ready(buffer) == [2]


def test_commit_wakes_a_waiting_trainer(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, commit=False)
    woken = threading.Event()
    waiting = threading.Event()

    def trainer() -> None:
        with buffer.changed:
            waiting.set()
            # The lock is held until the wait begins: the commit below cannot slip in between.
            if buffer.changed.wait(10):
                woken.set()

    thread = threading.Thread(target=trainer, daemon=True)
    thread.start()
    assert waiting.wait(10)
    buffer.commit("draw0", [make_trajectory()] * 2, 0)
    thread.join(10)
    assert woken.is_set()


def test_description_names_the_oldest_groups_in_flight(clock: Clock) -> None:
    buffer = ReplayBuffer(capacity=9, group_size=2, clock=clock)
    fill(buffer, *range(6), commit=False)
    clock.now += 3
    text = buffer.describe()
    assert text.startswith("in flight: 6 [draw 0 (row 0, 3.0 s), ")
    assert "draw 3" in text
    assert "draw 4" not in text
    assert "in training 0 of 9 slots" in text


@pytest.mark.parametrize("finished", [True, False])
def test_a_group_is_generated_again_in_its_place(buffer: ReplayBuffer, clock: Clock, finished: bool) -> None:
    fill(buffer, 0, 1, 2)
    fill(buffer, 3, commit=finished)
    clock.now += 5
    again = buffer.regenerate(3, version=8)
    assert (again.group_id, again.draw, again.prompt.row) == ("draw3", 3, 3)
    assert (again.start_version, again.target_step, again.dispatched_s) == (8, 1, 105.0)
    assert buffer.pending() == (again,)
    assert ready(buffer) == [0, 1, 2]
    assert buffer.occupied == 4, "the slot is kept"
    assert buffer.index.count_of_target(1) == 2, "and so is the target step"
    clock.now += 2
    group = buffer.commit("draw3", [make_trajectory(version=8)] * 2, end_version=9)
    assert (group.start_version, group.end_version, group.target_step, group.generation_s) == (8, 9, 1, 2.0)
    assert [g.draw for g in buffer.stale(8)] == [0, 1, 2], "what was committed before is forgotten"


def test_given_back_groups_free_their_slots_and_may_come_again(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2, 3)
    buffer.give_back([2, 0])
    assert ready(buffer) == [1, 3]
    assert buffer.occupied == 2
    assert [g.draw for g in buffer.index.ready_before_target(9)] == [1, 3]
    fill(buffer, 2)
    assert ready(buffer) == [1, 2, 3], "draw order, whenever it was dispatched"


def test_restored_groups_take_slots_and_are_ready(buffer: ReplayBuffer) -> None:
    restored = [make_group(draw, size=2, version=2, target_step=7) for draw in (5, 4)]
    for group in restored:
        buffer.restore(group)
    assert buffer.ready() == (restored[1], restored[0])
    fill(buffer, 6, commit=False)
    assert buffer.targets() == (3, 7, 7)
    assert [g.draw for g in buffer.index.ready_of_target(9, 7)] == [4, 5]
    fill(buffer, 7)
    with pytest.raises(ValueError, match="all 4 slots are taken"):
        buffer.restore(make_group(9, size=2))


def test_slots_may_be_restored_and_reserved_under_the_buffers_own_lock(buffer: ReplayBuffer) -> None:
    with buffer.changed:
        buffer.restore(make_group(0, size=2))
        fill(buffer, 1, commit=False)
    assert buffer.occupied == 2


def test_a_dropped_group_frees_its_slot(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, commit=False)
    buffer.remove("draw0")
    assert [slot.draw for slot in buffer.pending()] == [1]
    assert (buffer.occupied, len(buffer.pending()), buffer.ready_count) == (1, 1, 0)
    assert buffer.targets() == (0,)


def test_counts_per_target_include_what_is_being_generated(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2)
    fill(buffer, 3, commit=False)
    index = buffer.index
    assert [(index.count_of_target(step), index.pending_of_target(step)) for step in range(3)] == [
        (2, 0),
        (2, 1),
        (0, 0),
    ]
    assert (buffer.ready_count, len(buffer.pending())) == (3, 1)
    buffer.claim(buffer.ready()[:1])
    assert (index.count_of_target(0), buffer.ready_count) == (1, 2)
    assert buffer.targets() == (1, 0, 1, 0), "every slot"


def test_every_change_that_may_free_a_selection_wakes_the_trainer(buffer: ReplayBuffer, monkeypatch) -> None:
    woken = []
    monkeypatch.setattr(buffer.changed, "notify_all", lambda: woken.append(None))
    fill(buffer, 0, 1, 2, commit=False)
    assert not woken
    changes = [
        lambda: buffer.commit("draw0", [make_trajectory()] * 2, 0),
        lambda: buffer.remove("draw1"),
        lambda: buffer.regenerate(2, 5),
        lambda: buffer.restore(make_group(8, size=2)),
        lambda: buffer.give_back([8]),
    ]
    for count, change in enumerate(changes, 1):
        change()
        assert len(woken) == count
