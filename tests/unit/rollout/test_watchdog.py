import logging
import math

import pytest

from lightning_ppo.errors import RolloutError
from lightning_ppo.rollout.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, action: str = "abort", text: str = "in flight: 0, dispatch waits for a slot") -> Watchdog:
    return Watchdog(10.0, action, lambda: text, clock)  # type: ignore[arg-type]


def test_abort_says_what_hangs_and_what_to_do(clock: Clock) -> None:
    watchdog = watch(clock)
    watchdog.progress(0, 0)
    clock.now_s += 9.9
    watchdog.check()
    clock.now_s += 0.2
    with pytest.raises(RolloutError) as raised:
        watchdog.check()
    assert str(raised.value) == (
        "no prompt group was finished for timeout_s=10; in flight: 0, dispatch waits for a slot; "
        "look at the engine's log, or set a longer timeout_s"
    )


def test_a_stall_is_exactly_timeout_s_long(clock: Clock) -> None:
    watchdog = watch(clock)
    watchdog.progress(0)
    clock.now_s += 10.0
    with pytest.raises(RolloutError):
        watchdog.check()


# Pitfall 92.
def test_polling_does_not_restart_the_wait(clock: Clock) -> None:
    watchdog = watch(clock)
    for tenths in range(100):
        assert watchdog.left_s == pytest.approx(10.0 - tenths / 10)
        watchdog.progress(3, 1)
        watchdog.check()
        clock.now_s += 0.1
    clock.now_s += 1e-6
    watchdog.progress(3, 1)
    assert watchdog.left_s == 0
    with pytest.raises(RolloutError):
        watchdog.check()


@pytest.mark.parametrize("place", [0, 1], ids=["commits", "steps"])
def test_any_counter_is_progress(clock: Clock, place: int) -> None:
    watchdog = watch(clock)
    counters = [0, 0]
    for _ in range(20):
        watchdog.progress(*counters)
        watchdog.check()
        clock.now_s += 9.0
        counters[place] += 1
    watchdog.progress(*counters)
    clock.now_s += 10.5
    with pytest.raises(RolloutError):
        watchdog.check()


def test_without_any_counter_the_clock_starts_with_the_first_check(clock: Clock) -> None:
    watchdog = watch(clock)
    clock.now_s += 3600
    assert watchdog.left_s == 10
    watchdog.check()
    clock.now_s += 9
    watchdog.check()
    clock.now_s += 2
    with pytest.raises(RolloutError):
        watchdog.check()


def test_time_before_the_first_counters_does_not_count(clock: Clock) -> None:
    watchdog = watch(clock)
    clock.now_s += 3600
    watchdog.progress(0, 0)
    watchdog.check()
    assert watchdog.left_s == 10


def test_a_wait_that_begins_is_a_counter_like_any_other(clock: Clock) -> None:
    watchdog = watch(clock)
    watchdog.progress(4, 0, 1)
    clock.now_s += 3600
    watchdog.progress(4, 0, 2)
    watchdog.check()
    clock.now_s += 11
    with pytest.raises(RolloutError):
        watchdog.check()


def test_a_drain_that_makes_no_progress_is_a_stall(clock: Clock) -> None:
    left = [3]
    watchdog = Watchdog(10.0, "abort", lambda: f"in flight: {left[0]}, draining before a refit", clock)
    committed = 0
    for _ in range(2):
        clock.now_s += 8
        left[0] -= 1
        committed += 1
        watchdog.progress(committed, 0)
        watchdog.check()
    clock.now_s += 12
    watchdog.progress(committed, 0)
    with pytest.raises(RolloutError, match="in flight: 1, draining before a refit"):
        watchdog.check()


def test_warn_logs_once_per_stall_and_again_after_progress(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watchdog = watch(clock, "warn")

    def stall() -> list[str]:
        caplog.clear()
        for _ in range(30):
            clock.now_s += 1
            watchdog.check()
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING):
        watchdog.progress(0, 0)
        (first,) = stall()
        assert "timeout_s=10; in flight: 0, dispatch waits for a slot; look at the engine's log" in first
        assert "failures.stall_action=warn waits on" in first
        assert watchdog.left_s == math.inf
        watchdog.progress(0, 0)
        assert stall() == []
        watchdog.progress(1, 0)
        assert watchdog.left_s == 10
        assert len(stall()) == 1
