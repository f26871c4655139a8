import threading

import pytest

from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.testing import make_prompt, make_trajectory


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
        group_id = buffer.reserve(draw, make_prompt(row=draw), version=draw // 2, target_step=draw // 2)
        if commit:
            buffer.commit(group_id, [make_trajectory()] * 2, end_version=7)


def ready(buffer: ReplayBuffer) -> list[int]:
    return [group.draw for group in buffer.ready()]


def test_a_group_carries_what_was_stamped(buffer: ReplayBuffer, clock: Clock) -> None:
    prompt = make_prompt(row=9)
    group_id = buffer.reserve(5, prompt, version=3, target_step=4)
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
    assert buffer.last_commit_s == 102.5
    assert buffer.pending() == ()


def test_ready_groups_stand_in_dispatch_order_whatever_finishes_first(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2, commit=False)
    for draw in (2, 0, 1):
        buffer.commit(f"draw{draw}", [make_trajectory()] * 2, end_version=0)
        assert ready(buffer) == sorted(ready(buffer))
    assert ready(buffer) == [0, 1, 2]


def snapshot(buffer: ReplayBuffer) -> tuple:
    return buffer.pending(), buffer.ready(), buffer.claimed(), buffer.occupied, buffer.last_commit_s


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
    assert buffer.claimed() == (0, 1)
    buffer.release([0, 1])
    assert buffer.occupied == 1
    assert ready(buffer) == [2]


def test_unclaim_puts_groups_back_in_their_places(buffer: ReplayBuffer) -> None:
    fill(buffer, 0, 1, 2)
    groups = buffer.ready()
    buffer.claim([groups[0], groups[2]])
    buffer.unclaim()
    assert buffer.ready() == groups
    assert buffer.claimed() == ()
    assert buffer.occupied == 3


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
