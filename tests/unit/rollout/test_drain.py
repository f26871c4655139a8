"""New weights: in drain mode they wait for what is being generated, and for nothing else."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from draws import draw_of

from lightning_ppo.errors import EngineDiedError, EngineError, RewardError, RolloutError
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.testing import FakeEngine, make_prompt

WAIT_S = 20
DRAINED = {"in_flight_weight_updates": False, "max_lookahead_versions": 1}


def names(engine: FakeEngine, start: int = 0) -> list[str]:
    return [request.request_id for request in engine.requests[start:]]


class Gate:
    """An asynchronous reward that waits, for responses to one prompt, until another thread opens it."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.waiting = 0
        self.error: Exception | None = None
        """Raised by the first one that gets through."""
        self._open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, response: str, answer: str) -> float:
        self._loop = asyncio.get_running_loop()
        if answer == self.answer and not self._open.is_set():
            self.waiting += 1
            await self._open.wait()
            error, self.error = self.error, None
            if error is not None:
                raise error
        return 1.0

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open.set)


@pytest.fixture
def background() -> Iterator[Callable[..., "Future[Any]"]]:
    """Run something in another thread, as the trainer's is busy with the test."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def drain(collector: Any) -> None:
    collector.drain(lambda: None, poll_s=0.01)


def begin(collector: Any) -> tuple[Any, ...]:
    """Train step 0 up to its policy update; returns its groups."""
    collector.start(0, 0)
    return collector.next_groups(0, 0, lambda: None).groups


def finish(collector: Any, engine: FakeEngine, groups: Any, version: int) -> None:
    engine.update_weights([], version)
    collector.publish_version(version)
    collector.release([group.draw for group in groups])


def test_a_drain_waits_for_every_response_and_dispatches_nothing(build, until, background) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) >= 4)
    collector, _ = build(engine, max_inflight_prompts=2, **DRAINED)
    first = begin(collector)
    until(lambda: len(engine.held) == 4)
    drained = background(drain, collector)
    until(lambda: collector._responder.is_held)
    for name in ("draw4_g0", "draw4_g1", "draw5_g0"):
        engine.let_go(name)
        until(lambda: len(collector._responder.generating) == len(engine.held))
        assert not drained.done()
    engine.let_go()
    drained.result(WAIT_S)
    until(lambda: collector._pump.waiting_for == "the weight update")
    assert len(engine.requests) == 2 * 6, "the permits are free, and still nothing is dispatched"
    finish(collector, engine, first, 1)
    until(lambda: len(engine.held) == 4)
    assert {draw_of(request) for request in engine.requests[12:]} == {6, 7}


# Pitfall 85.
@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "windowed", "weight_fifo"])
def test_no_response_meets_two_versions(build, sampler: str) -> None:
    class Strict(FakeEngine):
        def update_weights(self, weights: Any, version: int) -> None:
            assert not self._running, "weights change under a response"
            super().update_weights(weights, version)

    engine = Strict(delay_s=lambda request: request.seed % 7 / 2000)
    collector, _ = build(engine, sampler=sampler, min_groups_for_streaming_train=1, **DRAINED)
    collector.start(0, 0)
    trained = []
    for step in range(5):
        groups: list[Any] = []
        while len(groups) < 4:
            groups += collector.next_groups(step, len(groups), lambda: None).groups
        drain(collector)
        finish(collector, engine, groups, step + 1)
        trained += groups
    assert len({group.draw for group in trained}) == 20
    assert any(group.start_version == step // 4 - 1 for step, group in enumerate(trained)), "it did run ahead"
    for group in trained:
        versions = {int(version) for row in group.trajectories for version in row.policy_versions}
        assert versions == {group.start_version}


def test_without_drain_an_update_does_not_wait(build, until) -> None:
    engine = FakeEngine(length=4, holds=lambda request: draw_of(request) >= 4)
    collector, _ = build(engine, max_lookahead_versions=1)
    first = begin(collector)
    until(lambda: len(engine.held) == 8)
    finish(collector, engine, first, 1)
    engine.let_go()
    (group, *_) = collector.next_groups(1, 0, lambda: None).groups
    assert group.trajectories[0].policy_versions.tolist() == [0, 0, 1, 1]


def test_the_deadline_names_what_holds_the_drain_up(build, until) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) in (4, 6))
    collector, _ = build(engine, timeout_s=0.15, **DRAINED)
    begin(collector)
    until(lambda: set(collector._responder.generating) == set(engine.held) and len(engine.held) == 4)
    with pytest.raises(RolloutError) as raised:
        drain(collector)
    text = str(raised.value)
    assert text.startswith("new weights waited for timeout_s=0.15; still generating 4 responses [draw4_g0 (")
    assert "draw6_g0" in text
    assert ", ...]" in text
    assert "\n" not in text


@pytest.mark.parametrize("fails", [False, True])
def test_a_reward_does_not_hold_the_drain_up_and_its_retry_waits_for_the_new_weights(build, until, fails: bool) -> None:
    reward = Gate("e")
    engine = FakeEngine(length=4)
    collector, _ = build(engine, reward=reward, **DRAINED)
    first = begin(collector)
    until(lambda: reward.waiting == 2)
    reward.error = ValueError("no service") if fails else None
    drain(collector)
    assert len(collector._buffer.pending()) == 1
    asked = len(engine.requests)
    reward.open()
    # ready, or failed and on its way to another attempt
    until(lambda: collector._budget.retries == 1 if fails else len(collector._buffer.pending()) == 0)
    time.sleep(0.02)
    assert len(engine.requests) == asked, "generated during the weight update"
    finish(collector, engine, first, 1)
    groups = collector.next_groups(1, 0, lambda: None).groups
    assert ("draw4_g0_try1" in names(engine, 16)) == fails
    rows = [row.policy_versions.tolist() for row in groups[0].trajectories]
    assert rows == ([[1] * 4, [0] * 4] if fails else [[0] * 4, [0] * 4])
    assert groups[0].oldest_version == 0


def test_a_failed_request_is_tried_again_before_the_weights_change(build, until, background) -> None:
    failed: list[str] = []

    def fails(request: Any) -> Exception | None:
        if draw_of(request) == 4 and len(failed) < 2:
            failed.append(request.request_id)
            return EngineError("HTTP 500")
        return None

    engine = FakeEngine(fails=fails, holds=lambda request: "_try" in request.request_id)
    collector, _ = build(engine, **DRAINED)
    begin(collector)
    until(lambda: len(engine.held) == 2)
    drained = background(drain, collector)
    until(lambda: collector._responder.is_held)
    assert set(collector._responder.generating) == {"draw4_g0", "draw4_g1"}
    assert not drained.done()
    engine.let_go()
    drained.result(WAIT_S)


def test_a_dead_engine_ends_the_drain_with_its_error(build, until, background) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) >= 4)
    collector, _ = build(engine, **DRAINED)
    begin(collector)
    until(lambda: len(engine.held) == 8)
    drained = background(collector.drain, lambda: None, 3600)
    until(lambda: collector._responder.is_held)
    engine.die("CUDA error")
    with pytest.raises(EngineDiedError, match="CUDA error"):
        drained.result(WAIT_S)


def test_a_failed_rollout_ends_the_drain_with_the_error_itself(build, until, background) -> None:
    reward, cause = Gate("f"), ZeroDivisionError("reward")
    reward.error = cause
    engine = FakeEngine(holds=lambda request: draw_of(request) == 4)
    collector, _ = build(engine, reward=reward, failures=FailureConfig(max_data_attempts=1), **DRAINED)
    begin(collector)
    until(lambda: len(engine.held) == 2 and reward.waiting == 2)
    drained = background(collector.drain, lambda: None, 3600)
    until(lambda: collector._responder.is_held)
    reward.open()
    with pytest.raises(RewardError) as raised:
        drained.result(WAIT_S)
    assert raised.value.__cause__ is cause
    with pytest.raises(RewardError) as again:
        drain(collector)
    assert again.value is raised.value


def test_an_error_outside_of_any_group_ends_the_drain_too(build, until, background, monkeypatch) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine, max_inflight_prompts=2, **DRAINED)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 4)
    error = EngineError("no prompt")

    def broken(version: int) -> None:
        raise error

    drained = background(collector.drain, lambda: None, 3600)
    until(lambda: collector._responder.is_held)
    monkeypatch.setattr(collector._sampler, "admit", broken)
    collector.publish_version(0)
    engine.let_go("draw0_g0")
    engine.let_go("draw0_g1")
    with pytest.raises(EngineError) as raised:
        drained.result(WAIT_S)
    assert raised.value is error


def test_a_stalled_drain_that_may_only_warn_waits_on(build, until, background, caplog) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 4)
    collector, _ = build(engine, timeout_s=0.1, failures=FailureConfig(stall_action="warn", backoff_s=0.0), **DRAINED)
    begin(collector)
    until(lambda: len(engine.held) == 2 == len(collector._responder.generating))
    caplog.set_level(logging.WARNING, "lightning_ppo")
    drained = background(drain, collector)
    until(lambda: len(caplog.records) == 1)
    time.sleep(0.25)
    assert not drained.done()
    engine.let_go()
    drained.result(WAIT_S)
    (record,) = caplog.records
    assert "still generating 2 responses [draw4_g0 (" in record.getMessage()
    assert "failures.stall_action=warn waits on" in record.getMessage()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_the_poll_raises_ends_the_drain(build, until, stop: type[BaseException]) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine, **DRAINED)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 16)

    def poll() -> None:
        raise stop(143)

    with pytest.raises(stop):
        collector.drain(poll)
    engine.let_go()
    assert len(collector.next_groups(0, 0, lambda: None).groups) == 4, "nothing was lost"


def test_closing_ends_the_drain(build, until, background) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine, **DRAINED)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 16)
    drained = background(drain, collector)
    until(lambda: collector._responder.is_held)
    collector.close()
    with pytest.raises(RolloutError, match="closed"):
        drained.result(WAIT_S)


def test_a_drain_without_rollouts_has_nothing_to_wait_for(build, until) -> None:
    collector, engine = build(timeout_s=0.5, **DRAINED)
    drain(collector)
    assert not collector._responder.is_held, "validation needs no version to be published"
    first = begin(collector)
    until(lambda: collector._buffer.ready_count == 4)
    drain(collector)
    drain(collector)
    finish(collector, engine, first, 1)
    assert len(collector.next_groups(1, 0, lambda: None).groups) == 4


def test_responses_outside_of_training_wait_for_the_new_weights_as_well(build, until, background) -> None:
    collector, engine = build(**DRAINED)
    first = begin(collector)
    until(lambda: collector._buffer.ready_count == 4)
    drain(collector)

    def sample() -> Any:
        prompts, sampling = [make_prompt(answer="a")], SamplingParams(6)
        return collector.jobs.sample(prompts, seed_namespace="validate", sampling=sampling, timeout_s=WAIT_S)

    asked, sampled = len(engine.requests), background(sample)
    time.sleep(0.05)
    assert len(engine.requests) == asked
    finish(collector, engine, first, 1)
    (row,) = sampled.result(WAIT_S)
    assert set(row.policy_versions.tolist()) == {1}


# Pitfall 83.
def test_an_update_in_flight_completes_while_a_rollout_is_stuck_in_its_reward(build, until) -> None:
    reward = Gate("e")
    collector, engine = build(reward=reward, max_lookahead_versions=1)
    first = begin(collector)
    until(lambda: reward.waiting == 2)
    finish(collector, engine, first, 1)
    until(lambda: len(engine.requests) == 2 * 12)
    assert len(collector._buffer.pending()) >= 1
    reward.open()
    groups = collector.next_groups(1, 0, lambda: None).groups
    assert [group.draw for group in groups] == [4, 5, 6, 7]
    assert (groups[0].start_version, groups[0].end_version) == (0, 1)


# Pitfall 89.
@pytest.mark.parametrize("dies", [False, True])
def test_a_slow_update_blocks_neither_health_checks_nor_rollouts(build, until, background, dies: bool) -> None:
    class Slow(FakeEngine):
        updating, confirmed = threading.Event(), threading.Event()

        def update_weights(self, weights: Any, version: int) -> None:
            if version == 1:
                self.updating.set()
                assert self.confirmed.wait(WAIT_S)
            super().update_weights(weights, version)

    engine = Slow(holds=lambda request: draw_of(request) >= 4)
    engine.updating.clear()
    engine.confirmed.clear()
    collector, _ = build(engine, max_lookahead_versions=1)
    begin(collector)
    until(lambda: len(engine.held) == 8)
    updated = background(engine.update_weights, [], 1)
    assert engine.updating.wait(WAIT_S)
    engine.check_health()
    if dies:
        engine.die()
        until(lambda: collector._failure is not None)
        with pytest.raises(EngineDiedError):
            engine.check_health()
    else:
        engine.let_go()
        until(lambda: collector._buffer.ready_count == 4)
    assert not updated.done()
    engine.confirmed.set()
    updated.result(WAIT_S)
