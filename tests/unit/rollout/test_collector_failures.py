import asyncio
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from draws import draw_of

from lightning_ppo.errors import DataError, EngineDiedError, EngineError, RewardError, RolloutError
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.ledger import DrawState
from lightning_ppo.testing import FakeEngine, make_prompt


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rollout-collector"]


def occupied_by_finished_groups(collector: Any) -> bool:
    buffer = collector._buffer
    return not buffer.pending() and buffer.occupied == len(buffer.ready()) + len(buffer.claimed())


# Pitfall 82.
def test_a_failing_reward_is_an_error_and_never_a_row(build, until) -> None:
    cause = ZeroDivisionError("reward")

    def reward(answer):
        if answer == "c":
            raise cause
        return 1.0

    engine = FakeEngine(holds=lambda request: draw_of(request) != 2)
    collector, _ = build(engine, reward=reward)
    collector.start(0, 0)
    with pytest.raises(RewardError, match=r"prompt row 2.*'\^c='") as first:
        collector.next_groups(0, 0, lambda: None)
    assert first.value.__cause__ is cause
    assert collector._buffer.ready() == ()
    assert occupied_by_finished_groups(collector), "every permit is back"
    held = {request.request_id for request in engine.requests if draw_of(request) != 2}
    assert {"draw0_g0", "draw1_g0", "draw3_g0"} <= held <= set(engine.cancelled)
    asked = len(engine.requests)
    with pytest.raises(RewardError) as second:
        collector.next_groups(0, 0, lambda: None)
    assert second.value is first.value
    collector.publish_version(1)
    assert len(engine.requests) == asked, "the pump has stopped"


def test_the_engines_error_arrives_as_it_is_though_enough_groups_are_ready(build, until) -> None:
    error = EngineError("HTTP 500")
    engine = FakeEngine(fails=lambda request: error if request.request_id.startswith("draw5_g1") else None)
    collector, _ = build(engine, max_lookahead_versions=1)
    collector.start(0, 0)
    until(lambda: collector._failure is not None)
    with pytest.raises(EngineError) as raised:
        collector.next_groups(0, 0, lambda: None)
    assert raised.value is error
    assert occupied_by_finished_groups(collector)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (), "logprobs": (), "policy_versions": ()}, "0 tokens for max_tokens=6"),
        ({"token_ids": (1,) * 7, "logprobs": (0.0,) * 7, "policy_versions": (0,) * 7}, "7 tokens for max_tokens=6"),
        ({"logprobs": (0.0,)}, "3 tokens, 1 log-probs, 3 versions"),
        ({"policy_versions": ()}, "3 tokens, 3 log-probs, 0 versions"),
        ({"logprobs": (0.0, float("nan"), 0.0)}, "not finite"),
        ({"finish_reason": "abort"}, "finish_reason=abort"),
    ],
)
def test_an_answer_that_is_no_response_is_an_error(build, changes: dict, message: str) -> None:
    class Broken(FakeEngine):
        async def generate(self, request):
            return replace(await super().generate(request), **changes)

    collector, _ = build(Broken(length=3))
    collector.start(0, 0)
    with pytest.raises(EngineError, match=message):
        collector.next_groups(0, 0, lambda: None)


@pytest.mark.parametrize("what", ["commit", "drop"])
def test_a_failure_behind_a_groups_end_is_the_only_one(build, until, monkeypatch, caplog, what: str) -> None:
    """Its slot is free already: giving it up again would fail in the event loop, once for every group."""
    full = RolloutError("journal=here cannot be written; free some space")
    drop = FailureConfig(backoff_s=0.0, max_data_attempts=1, drop="replace", max_dropped_prompts=9)

    def reward(response):
        if what == "drop":
            raise ValueError("bad row")
        return 1.0

    def fail(*args: Any) -> None:
        raise full

    collector, _ = build(reward=reward, failures=drop)
    if what == "commit":
        monkeypatch.setattr(collector._snapshots, "append", fail)
    else:
        following = collector._stream.next_draw
        monkeypatch.setattr(
            collector._stream, "next_draw", lambda: following() if collector._stream._next < 4 else fail()
        )
    with caplog.at_level(logging.ERROR):
        collector.start(0, 0)
        until(lambda: collector._failure is not None and not collector._pump._running)
        with pytest.raises(RolloutError) as raised:
            collector.next_groups(0, 0, lambda: None)
    assert raised.value is full
    assert caplog.records == []
    assert collector._buffer.pending() == ()
    states = [collector._stream.ledger.state(draw) for draw in range(4)]
    assert set(states) <= {None, DrawState.READY if what == "commit" else DrawState.SKIPPED}
    assert len(collector._buffer.ready()) == states.count(DrawState.READY)


def test_a_request_that_the_engine_cancels_is_not_lost_in_silence(build) -> None:
    collector, _ = build(FakeEngine(fails=lambda request: asyncio.CancelledError()))
    collector.start(0, 0)
    with pytest.raises(RolloutError, match="the engine cancelled request draw"):
        collector.next_groups(0, 0, lambda: None)
    assert occupied_by_finished_groups(collector)


def test_an_exit_inside_the_engine_does_not_end_the_event_loop(build) -> None:
    collector, _ = build(FakeEngine(fails=lambda request: SystemExit(3)))
    collector.start(0, 0)
    with pytest.raises(EngineError, match=r"the engine called exit\(3\) in request draw"):
        collector.next_groups(0, 0, lambda: None)
    assert threads() == ["rollout-collector"]


def test_whatever_ends_the_event_loop_is_reported(build, until) -> None:
    collector, engine = build(FakeEngine(holds=lambda request: True))
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)

    def crash() -> None:
        raise SystemExit(7)

    collector._thread.call(crash)
    with pytest.raises(RolloutError, match=r"the rollout thread stopped \(SystemExit: 7\)"):
        collector.next_groups(0, 0, lambda: None)
    until(lambda: threads() == [])
    assert len(engine.cancelled) == 8


@pytest.mark.parametrize("job", ["training", "validation"])
def test_a_reward_that_hangs_is_what_a_stall_names(build, job: str) -> None:
    go_on = threading.Event()

    def slow(response):
        go_on.wait(20)
        return 1.0

    async def slower(response):
        await asyncio.sleep(20)
        return 1.0

    def wait(collector: Any) -> Any:
        if job == "training":
            collector.start(0, 0)
            return collector.next_groups(0, 0, lambda: None, poll_s=0.05)
        prompts = [make_prompt(row=row) for row in range(8)]
        return collector.jobs.sample(prompts, seed_namespace="side", sampling=SamplingParams(6), timeout_s=0.4)

    def stalled(reward: Any) -> str:
        with pytest.raises(RolloutError) as raised:
            wait(build(reward=reward, timeout_s=0.4)[0])
        return str(raised.value)

    try:
        text = stalled(slow)
        assert ", being sampled: 7 responses, being rewarded: 1" in text
        assert "; look at the reward test_a_reward_that_hangs_is_what_a_stall_names.<locals>.slow, which " in text
        assert text.endswith("which does not return and holds everything else up, or set a longer timeout_s")
    finally:
        go_on.set()
    text = stalled(slower)
    assert ", being sampled: 0 responses, being rewarded: 8" in text
    assert text.endswith(".slower, which every response waits for, or set a longer timeout_s")


def test_nothing_finished_within_the_deadline(build) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) in (1, 3))
    collector, _ = build(engine, timeout_s=0.15)
    collector.start(0, 0)
    with pytest.raises(RolloutError) as error:
        collector.next_groups(0, 0, lambda: None, poll_s=0.05)
    text = str(error.value)
    assert "no prompt group was finished for timeout_s=0.15; in flight: 2 [draw 1 (row 1, " in text
    assert "draw 3 (row 3" in text
    assert "dispatch waits for the next policy version" in text
    assert "; FakeEngine; look at " in text
    assert "\n" not in text


def test_the_deadline_starts_anew_with_every_commit(build) -> None:
    # Four groups, 0.3 s apart and one after the other: 1.2 s in all, never a second without one.
    collector, _ = build(FakeEngine(delay_s=0.3), timeout_s=1.0, max_inflight_prompts=1)
    collector.start(0, 0)
    assert len(collector.next_groups(0, 0, lambda: None).groups) == 4


def test_time_in_training_does_not_count_as_waiting(build, until) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) >= 4)
    collector, _ = build(engine, timeout_s=0.7)
    collector.start(0, 0)
    collector.next_groups(0, 0, lambda: None)
    time.sleep(0.8)
    collector.publish_version(1)
    threading.Timer(0.05, lambda: (until(lambda: len(engine.held) == 8), engine.let_go())).start()
    assert len(collector.next_groups(1, 0, lambda: None).groups) == 4


def test_death_is_reported_by_the_requests_in_flight(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)
    engine.die("CUDA error: out of memory")
    with pytest.raises(EngineDiedError, match="out of memory"):
        collector.next_groups(0, 0, lambda: None)


def test_death_is_noticed_by_the_health_check_when_requests_just_hang(build, until) -> None:
    class Silent(FakeEngine):
        dead = False

        def check_health(self) -> None:
            if self.dead:
                raise EngineDiedError("no process")

    engine = Silent(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)

    def poll() -> None:
        engine.dead = len(engine.held) == 8

    with pytest.raises(EngineDiedError, match="no process"):
        collector.next_groups(0, 0, poll, poll_s=0.01)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_the_poll_raises_propagates_and_nothing_is_lost(build, until, stop: type[BaseException]) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            raise stop(143)

    with pytest.raises(stop):
        collector.next_groups(0, 0, poll, poll_s=0.01)
    until(lambda: len(engine.held) == 8)
    engine.let_go()
    assert len(collector.next_groups(0, 0, lambda: None).groups) == 4


# Pitfall 83.
def test_the_poll_holds_no_lock(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)

    def poll() -> None:
        engine.let_go()
        # The event loop can only commit if the trainer does not hold the buffer's lock here.
        until(lambda: len(collector._buffer.ready()) == 4)

    assert len(collector.next_groups(0, 0, poll).groups) == 4


def test_a_filter_that_keeps_no_row_fails_the_next_wait(build) -> None:
    collector, _ = build(keep=lambda row: False)
    collector.start(0, 0)
    with pytest.raises(DataError, match="handed out no prompt"):
        collector.next_groups(0, 0, lambda: None)


def test_a_reward_that_never_returns_meets_its_deadline(build) -> None:
    async def hangs(response):
        await asyncio.Event().wait()

    collector, _ = build(reward=hangs, reward_timeout_s=0.05)
    collector.start(0, 0)
    with pytest.raises(RewardError, match=r"took longer than reward_timeout_s=0\.05"):
        collector.next_groups(0, 0, lambda: None)


def test_slots_of_tasks_that_never_started_are_freed(build) -> None:
    collector, engine = build()
    pump = collector._pump

    async def main() -> None:
        task = asyncio.create_task(pump.run())
        # One turn of the loop: the pump has dispatched, none of the groups has run.
        await asyncio.sleep(0)
        assert collector._buffer.occupied == 4
        assert engine.requests == []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 10))
    assert collector._buffer.occupied == 0
