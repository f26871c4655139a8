"""Whatever ends a group's task, wherever it waits: slot, permit, ledger and count of responses are given back."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from draws import draw_of

from lightning_ppo.errors import EngineDiedError, RolloutError
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.testing import FakeEngine

WAIT_S = 20
VICTIM, CULPRIT = 1, 3
"""Draws: the group that waits somewhere, and the one that fails when the test says so."""
PLACES = ["engine", "reward", "back-off", "hold", "slot"]


class Scene:
    """A collector of groups of which draw 1 waits in a chosen place; draws 0, 2 and 3 are held in the engine.

    * engine: its responses are being sampled
    * reward: they are being rewarded
    * back-off: they failed, and wait an hour for another attempt
    * hold: they failed, and wait for new weights
    * slot: it waits for a permit
    """

    def __init__(self, build: Callable[..., Any], until: Callable[..., None], place: str) -> None:
        class Engine(FakeEngine):
            async def generate(self, request: Any) -> Any:
                generation = await super().generate(request)
                if draw_of(request) == CULPRIT:
                    raise EngineDiedError("gone")
                return generation

        self._place = place
        self._is_first = True
        self.engine = Engine(length=4, holds=self._holds)
        backoff_s = 3600.0 if place == "back-off" else 0.0
        self.collector, _ = build(
            self.engine,
            reward=self._reward,
            failures=FailureConfig(backoff_s=backoff_s, max_backoff_s=backoff_s),
            max_inflight_prompts=3 if place == "slot" else None,
            max_trajectory_age_steps=0,
        )
        self.rewards = 0
        self.collector.start(0, 0)
        if place == "slot":
            # as a group that was found too old: it has its slot, and others have the permits
            until(lambda: len(self.engine.held) == 6)
            self.engine.let_go("draw1_g0")
            self.engine.let_go("draw1_g1")
            until(lambda: self.collector._buffer.ready_count == 1 and len(self.engine.held) == 6)
            self.collector._thread.call(self._again)
        until(self._is_in_place)
        until(lambda: len(self.engine.held) == (8 if place == "engine" else 6))

    @property
    def victim(self) -> Any:
        return self.collector._buffer.index.find_ready(VICTIM)

    def go_on(self) -> None:
        """Whatever comes next meets no obstacle."""
        self._place = ""

    def _again(self) -> None:
        collector = self.collector
        with collector._buffer.changed:
            slot = collector._buffer.regenerate(VICTIM, 0)
            collector._stream.ledger.regenerate(VICTIM)
            collector._pump.dispatch_again(slot, {})
        collector._pump.wake()

    def _is_in_place(self) -> bool:
        names, pump = {f"draw{VICTIM}_g0", f"draw{VICTIM}_g1"}, self.collector._pump
        if self._place == "engine":
            return names <= set(self.engine.held)
        if self._place == "slot":
            return len(pump._again) == 1 and pump.waiting_for == "an in-flight permit"
        return self.rewards == 2 and not names & set(self.collector._responder.generating)

    def _holds(self, request: Any) -> bool:
        return self._place != "" and (draw_of(request) != VICTIM or self._place in ("engine", "slot"))

    async def _reward(self, response: str, answer: str) -> float:
        if answer == "abcdefgh"[VICTIM] and self._place != "":
            self.rewards += 1
            if self._place == "reward":
                await asyncio.Event().wait()
            if self._place == "hold":
                self.collector._responder.hold()
            if self._place in ("hold", "back-off"):
                raise ConnectionError("no service")
        return 1.0


def assert_clean(collector: Any) -> None:
    """Nothing is left of any task: only finished groups have slots."""
    with collector._buffer.changed:
        buffer, pump, counts = collector._buffer, collector._pump, collector._stream.ledger.counts()
        assert len(buffer.pending()) == counts["in_flight"] == counts["drawn"] == 0
        assert buffer.occupied == buffer.ready_count + len(buffer.claimed())
        assert counts["ready"] == buffer.ready_count
        assert (pump._running, pump._outdated, len(pump._again)) == ({}, set(), 0)
        assert not collector._responder.generating


@pytest.mark.parametrize("place", PLACES)
def test_another_group_fails(build, until, place: str) -> None:
    scene = Scene(build, until, place)
    scene.engine.let_go(f"draw{CULPRIT}_g0")
    until(lambda: scene.collector._failure is not None)
    with pytest.raises(EngineDiedError, match="gone"):
        scene.collector.next_groups(0, 0, lambda: None)
    assert_clean(scene.collector)
    assert not scene.engine._running


@pytest.mark.parametrize("place", PLACES)
def test_the_collector_is_closed(build, until, place: str) -> None:
    scene = Scene(build, until, place)
    scene.collector.close()
    assert_clean(scene.collector)
    assert not scene.engine._running


@pytest.mark.parametrize("place", PLACES)
def test_the_group_gets_too_old(build, until, place: str) -> None:
    scene = Scene(build, until, place)
    collector, engine, pump = scene.collector, scene.engine, scene.collector._pump
    scene.go_on()
    engine.update_weights([], 5)
    collector.publish_version(5)
    until(lambda: scene.victim is not None and scene.victim.start_version == 5)
    assert {int(v) for row in scene.victim.trajectories for v in row.policy_versions} == {5}
    # draw 3 ends the run, as it must
    until(lambda: collector._failure is not None)
    assert not pump._attempts.keys() & pump._running.keys()
    assert_clean(collector)


def test_groups_whose_tasks_were_cancelled_before_they_ran(build) -> None:
    collector, engine = build()

    async def main() -> None:
        task = asyncio.create_task(collector._pump.run())
        await asyncio.sleep(0)
        assert collector._buffer.occupied == 4
        for running, _ in collector._pump._running.values():
            running.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert engine.requests == []
    assert_clean(collector)


@pytest.mark.parametrize("turns", range(14))
def test_a_pump_that_is_cancelled_at_any_turn_of_the_loop(build, turns: int) -> None:
    async def reward(response: str) -> float:
        await asyncio.sleep(0)
        return 1.0

    collector, engine = build(reward=reward)
    pump = collector._pump

    async def main() -> None:
        task = asyncio.create_task(pump.run())
        for turn in range(turns):
            await asyncio.sleep(0)
            if turn % 4 == 3:
                # in the middle of an abort as well
                pump.version += 2
                pump.on_version(pump.version)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert_clean(collector)
    assert not engine._running


def test_a_group_that_fails_in_the_turn_in_which_it_gets_too_old_is_not_generated_again(build, until) -> None:
    error = EngineDiedError("gone")

    def fails(request: Any) -> Exception | None:
        if draw_of(request) != 2:
            return None
        # the version is known to the pump before the loop tells it that the task has ended
        collector._pump.version = 5
        asyncio.get_running_loop().call_soon(collector._pump.on_version, 5)
        return error

    collector, _ = build(FakeEngine(fails=fails), num_generations_per_prompt=1)
    collector.start(0, 0)
    until(lambda: collector._failure is not None)
    assert collector._failure is error
    assert_clean(collector)


def test_a_group_is_not_started_again_while_its_last_task_ends(build, until, monkeypatch) -> None:
    collector, engine = build()
    pump, buffer = collector._pump, collector._buffer
    started: list[bool] = []

    def found_too_old(group: Any) -> None:
        # by the trainer's thread in the turn of the commit, while the pump is about to look at its gates
        if group.draw == 0 and not started:
            slot = buffer.regenerate(0, 0)
            collector._stream.ledger.regenerate(0)
            pump.dispatch_again(slot, {})
            started.append(pump._dispatch(None))

    monkeypatch.setattr(pump, "_on_commit", found_too_old)
    collector.start(0, 0)
    until(lambda: buffer.ready_count == 4)
    until(lambda: not pump._running)
    assert started == [False]
    assert [request.request_id for request in engine.requests].count("draw0_g0") == 2
    assert_clean(collector)


def test_dispatching_after_the_end_is_refused(build) -> None:
    collector, _ = build()
    collector.start(0, 0)
    collector.close()
    with pytest.raises(RolloutError, match="is closed"):
        collector.drain(lambda: None)
