"""No response is older than it may be when it is trained: what gets too old is generated again in its place."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from draws import draw_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.replay_index import PendingGroup
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import CHARACTERS, FakeEngine

READY_FIRST = {"sampler": "ready_first", "max_lookahead_versions": 1, "max_trajectory_age_steps": 1}


def names(engine: FakeEngine, draw: int) -> list[str]:
    return [request.request_id for request in engine.requests if draw_of(request) == draw]


def versions(group: Any) -> set[int]:
    return {int(version) for row in group.trajectories for version in row.policy_versions}


def slot_of(collector: Collector, draw: int) -> PendingGroup:
    return next(slot for slot in collector._buffer.pending() if slot.draw == draw)


class Run:
    """A trainer's side of the collector, one call per phase."""

    def __init__(self, collector: Collector, engine: FakeEngine, version: int = 0) -> None:
        self.collector, self.engine, self.step = collector, engine, version
        collector.start(version, version)

    def select(self, consumed: int = 0) -> list[Any]:
        return list(self.collector.next_groups(self.step, consumed, lambda: None).groups)

    def update(self, groups: list[Any]) -> None:
        self.step += 1
        self.engine.update_weights([], self.step)
        self.collector.publish_version(self.step)
        self.collector.release([group.draw for group in groups])


def test_a_group_in_flight_that_gets_too_old_is_generated_again_in_its_place(build, until) -> None:
    engine = FakeEngine(length=4, holds=lambda request: draw_of(request) == 0)
    collector, _ = build(engine, **READY_FIRST)
    run = Run(collector, engine)
    until(lambda: collector._buffer.ready_count == 7)
    slot = slot_of(collector, 0)
    for expected in ([1, 2, 3, 4], [5, 6, 7, 8]):
        groups = run.select()
        assert [group.draw for group in groups] == expected
        assert not engine.cancelled, "one update old is young enough"
        run.update(groups)
    until(lambda: len(names(engine, 0)) == 4)
    assert names(engine, 0) == ["draw0_g0", "draw0_g1", "draw0_g0_try1", "draw0_g1_try1"]
    assert sorted(engine.cancelled) == ["draw0_g0", "draw0_g1"]
    again = slot_of(collector, 0)
    assert (again.draw, again.prompt, again.target_step) == (slot.draw, slot.prompt, slot.target_step)
    assert (slot.start_version, again.start_version) == (0, 2)
    assert collector._stream.ledger.state(0) == "in_flight"
    until(lambda: len(engine.held) == 2)
    engine.let_go()
    until(lambda: collector._buffer.index.find_ready(0) is not None)
    groups = run.select()
    assert groups[0].draw == 0
    assert versions(groups[0]) == {2}


def test_aborted_twice_it_has_a_name_of_its_own_each_time(build, until) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 0)
    collector, _ = build(engine, **READY_FIRST)
    run = Run(collector, engine)
    for _ in range(5):
        groups = run.select()
        run.update(groups)
        asked = 2 * (run.step // 2 + 1)
        until(lambda asked=asked: len(names(engine, 0)) == asked)
        assert slot_of(collector, 0).start_version == run.step // 2 * 2
    assert len(set(names(engine, 0))) == 6
    assert not set(engine.held) & set(engine.cancelled)


def test_a_straggler_that_is_finished_but_too_old_is_generated_again(build, until) -> None:
    engine = FakeEngine(length=4, holds=lambda request: request.request_id in ("draw0_g0", "draw0_g1"))
    collector, _ = build(engine, num_generations_per_prompt=2, **READY_FIRST)
    run = Run(collector, engine)
    run.update(run.select())
    groups = run.select()
    engine.let_go()
    until(lambda: collector._buffer.index.find_ready(0) is not None)
    straggler = collector._buffer.index.find_ready(0)
    assert straggler is not None
    assert versions(straggler) == {0, 1}, "it went on through the update"
    occupied = collector._buffer.occupied
    run.update(groups)
    assert collector._buffer.occupied == occupied - 4
    run.update(run.select())
    # as a whole, in its slot, on the new weights; then it is the first in line again
    until(lambda: len(engine.held) == 2)
    assert slot_of(collector, 0).start_version == 2
    engine.let_go()
    until(lambda: collector._buffer.index.find_ready(0) is not None)
    group = run.select()[0]
    assert group.draw == 0
    assert versions(group) == {2, 3}
    assert names(engine, 0) == ["draw0_g0", "draw0_g1"] * 2


def test_what_waited_for_its_dispatch_is_stamped_when_it_starts(build, until) -> None:
    # Draw 4 is dropped while weights are about to change: its replacement starts on the new ones.
    engine = FakeEngine(
        holds=lambda request: draw_of(request) == 4,
        fails=lambda request: None,
    )
    failures = FailureConfig(backoff_s=0.0, max_data_attempts=1, drop="replace", max_dropped_prompts=1)
    rewarded: list[str] = []

    def reward(answer: str) -> float:
        rewarded.append(answer)
        if answer == CHARACTERS[6 + 4]:
            raise ValueError("no answer")
        return 1.0

    collector, _ = build(
        engine,
        reward=reward,
        failures=failures,
        max_lookahead_versions=1,
        in_flight_weight_updates=False,
    )
    run = Run(collector, engine)
    groups = run.select()
    until(lambda: len(engine.held) == 2)
    collector._thread.call(collector._responder.hold)
    until(lambda: collector._responder.is_held)
    engine.let_go()
    until(lambda: collector._stream.ledger.state(4) == "skipped")
    assert slot_of(collector, 8).start_version == 0
    asked = len(engine.requests)
    collector.drain(lambda: None, poll_s=0.01)
    assert len(engine.requests) == asked
    run.update(groups)
    groups = run.select()
    assert [group.draw for group in groups] == [5, 6, 7, 8]
    (replacement,) = (group for group in groups if group.draw == 8)
    assert (replacement.start_version, replacement.end_version, versions(replacement)) == (1, 1, {1})
    assert replacement.target_step == 1


def test_a_sampler_may_abort_earlier_than_the_bound_demands(build, until, monkeypatch) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 0)
    collector, _ = build(engine, **READY_FIRST)
    monkeypatch.setattr(collector._sampler, "aborts_inflight", lambda start, version: start < version)
    run = Run(collector, engine)
    run.update(run.select())
    until(lambda: len(names(engine, 0)) == 4)
    assert slot_of(collector, 0).start_version == 1


def test_a_restored_group_whose_finished_part_got_too_old_starts_from_nothing(build, until) -> None:
    held = FakeEngine(holds=lambda request: request.request_id != "draw0_g0")
    first, _ = build(held, max_inflight_prompts=1, **READY_FIRST)
    first.start(0, 0)
    until(lambda: held.held == ("draw0_g1",) and len(first._pump.finished_siblings(0)) == 1)
    state = first.state_dict()
    first.close()

    def resumed(settle: Callable[[Any], None]) -> tuple[Any, FakeEngine]:
        engine = FakeEngine(length=4)
        engine.update_weights([], 0)
        collector, _ = build(engine, max_inflight_prompts=1, **READY_FIRST)
        collector.load_state_dict(state)
        collector._pump._oldest_allowed = 0
        settle(collector)
        run = Run(collector, engine)
        return run.select()[0], engine

    group, engine = resumed(lambda collector: None)
    assert names(engine, 0) == ["draw0_g1"], "its finished response is kept"
    group, engine = resumed(lambda collector: setattr(collector._pump, "_oldest_allowed", 1))
    assert names(engine, 0) == ["draw0_g0", "draw0_g1"]
    assert group.draw == 0


RUNS = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(["in_order", "ready_first", "windowed", "weight_fifo"]),
        "lookahead": st.integers(0, 2),
        "more_age": st.integers(0, 2),
        "warmup": st.integers(0, 2),
        "more_lead": st.none() | st.integers(0, 2),
        "groups": st.integers(1, 3),
        "generations": st.integers(1, 2),
        "streams": st.booleans(),
        "in_flight": st.booleans(),
        "permits": st.none() | st.integers(1, 3),
        "seed": st.integers(0, 2**16),
        "trainer_ms": st.lists(st.sampled_from([0, 1, 4, 8]), min_size=5, max_size=5),
        "faulty": st.booleans(),
    }
)


def collector_of(run: dict[str, Any], engine: FakeEngine, tokenizer: Any) -> tuple[Collector, VersionWindow]:
    age = run["lookahead"] + run["more_age"]
    lead = None if run["more_lead"] is None or run["warmup"] == 0 else age + run["more_lead"]
    config = RolloutConfig(
        num_prompts_per_step=run["groups"],
        num_generations_per_prompt=run["generations"],
        min_groups_for_streaming_train=1 if run["streams"] else run["groups"],
        sampler=run["sampler"],
        max_lookahead_versions=run["lookahead"],
        max_trajectory_age_steps=age,
        warmup_generation_lead_steps=lead,
        in_flight_weight_updates=run["in_flight"],
        max_inflight_prompts=run["permits"],
        max_response_tokens=6,
        timeout_s=20.0,
        failures=FailureConfig(backoff_s=0.0, max_infra_attempts=9),
    )
    prompts = PromptSet([{"prompt": f"^{CHARACTERS[6 + row]}="} for row in range(7)], tokenizer, 3)
    return Collector(
        engine,
        prompts,
        PromptStream(7, run["seed"], True),
        RewardFunction(lambda response: float(len(response)), prompts.columns, 10.0),
        make_sampler(config, run["warmup"]),
        config,
        tokenizer=tokenizer,
        run_seed=run["seed"],
        stop_token_ids=(1,),
        warmup_steps=run["warmup"],
    ), VersionWindow.of(config, run["warmup"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=RUNS)
def test_the_bound_holds_whatever_takes_how_long(tokenizer: Any, run: dict[str, Any]) -> None:
    def delay_s(request: Any) -> float:
        # a few are many times as slow as the others, so that versions pass by
        place = (request.seed + run["seed"]) % 8
        return 0.009 if place == 0 else 0.001 * (place % 3)

    def fails(request: Any) -> Exception | None:
        is_first = "_try" not in request.request_id
        return EngineError("HTTP 503") if run["faulty"] and is_first and request.seed % 4 == 0 else None

    engine = FakeEngine(length=4, delay_s=delay_s, fails=fails)
    collector, window = collector_of(run, engine, tokenizer)
    trained: Counter[int] = Counter()
    try:
        trainer = Run(collector, engine)
        for pause_ms in run["trainer_ms"]:
            step, groups = trainer.step, []
            while len(groups) < run["groups"]:
                claimed = trainer.select(len(groups))
                for group in claimed:
                    oldest = min(versions(group))
                    assert window.policy_age(step, oldest) <= window.max_age
                    assert group.start_version <= oldest
                    assert len(group.trajectories) == run["generations"]
                    for row in group.trajectories:
                        assert run["in_flight"] or len(set(row.policy_versions.tolist())) == 1
                    if group.target_step is not None:
                        assert group.target_step == step
                groups += claimed
                time.sleep(pause_ms / 1000)
            if not run["in_flight"]:
                collector.drain(lambda: None, poll_s=0.01)
                assert not engine._running
            trainer.update(groups)
            trained.update(group.draw for group in groups)
            with collector._buffer.changed:
                buffer, counts = collector._buffer, collector._stream.ledger.counts()
                assert buffer.occupied <= buffer._capacity
                assert counts["in_flight"] == len(buffer.pending())
                assert counts["ready"] == buffer.ready_count
                assert counts["claimed"] == len(buffer.claimed()) == 0
                assert counts["trained"] == len(trained) == trainer.step * run["groups"]
    finally:
        collector.close()
    assert set(trained.values()) == {1}
    assert len(collector._buffer.pending()) == 0
    assert collector._stream.ledger.counts()["in_flight"] == 0
    assert not collector._responder.generating
    assert not engine._running
