import random
import threading
from pathlib import Path
from typing import Any

import pytest
from draws import draw_of

from lightning_ppo.errors import CheckpointError, DataError
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.testing import FakeEngine


def draws(chunks: Any) -> list[list[int]]:
    return [[group.draw for group in chunk] for chunk in chunks]


def all_draws(steps: Any) -> list[int]:
    return [group.draw for chunks in steps for chunk in chunks for group in chunk]


def contents(steps: Any) -> list[tuple]:
    """Everything of every trained row that must be reproducible, in training order."""
    return [
        (row.sample_id, row.response_ids.tolist(), row.rollout_logprobs.tolist(), row.reward, row.finish_reason)
        for chunks in steps
        for chunk in chunks
        for group in chunk
        for row in group.trajectories
    ]


def jitter(request: Any) -> float:
    return random.Random(request.seed).random() * 0.01


# Pitfalls 95 and 97: stop after every step of two epochs, with the next step's rollouts in flight.
@pytest.mark.parametrize("stop", range(1, 4))
def test_a_resumed_run_trains_the_same_rows(build, train, stop: int) -> None:
    settings: dict[str, Any] = {"rows": 6, "shuffle": True, "seed": 11}
    whole = contents(train(*build(**settings), range(4)))
    first, engine = build(FakeEngine(delay_s=jitter), **settings)
    before = contents(train(first, engine, range(stop)))
    state = first.state_dict()
    assert state["stream"]["cursor"] == 4 * stop, "what is in flight does not count"
    first.close()
    second, engine = build(**settings)
    second.load_state_dict(state)
    assert before + contents(train(second, engine, range(stop, 4))) == whole


def test_ready_first_loses_no_prompt_over_a_resume(build, train) -> None:
    settings: dict[str, Any] = {"sampler": "ready_first", "max_lookahead_versions": 2, "rows": 8}
    # Draw 1 is so slow that it is untrained when the run ends: the cursor must wait for it.
    engine = FakeEngine(holds=lambda request: draw_of(request) == 1)
    first, _ = build(engine, **settings)
    before = all_draws(train(first, engine, range(2)))
    state = first.state_dict()
    first.close()
    assert 1 not in before
    assert state["stream"]["cursor"] == 1
    second, engine = build(**settings)
    second.load_state_dict(state)
    after = all_draws(train(second, engine, range(2, 5)))
    assert sorted(before + after) == list(range(20))
    assert 1 in after


def test_state_of_other_prompts_or_of_a_running_collector_is_refused(build) -> None:
    collector, _ = build()
    state = collector.state_dict()
    with pytest.raises(CheckpointError, match="prompts differ"):
        build(rows=15)[0].load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed=1 differs"):
        build(seed=1)[0].load_state_dict(state)
    collector.start(0, 0)
    with pytest.raises(CheckpointError, match="run already"):
        collector.load_state_dict(state)


def test_recorded_chunks_are_replayed_whatever_finishes_first(build, train, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"min_groups_for_streaming_train": 1, "num_prompts_per_step": 6}
    collector, engine = build(FakeEngine(delay_s=jitter), **settings)
    recorded = train(collector, engine, range(3), 6)
    path = tmp_path / "schedule.jsonl"
    for step, chunks in enumerate(recorded):
        ChunkSchedule.append(path, step, draws(chunks))
    for delay_s in (0.0, lambda request: 0.01 - jitter(request)):
        collector, engine = build(FakeEngine(delay_s=delay_s), replay_chunks=str(path), **settings)
        again = train(collector, engine, range(3), 6)
        assert [draws(chunks) for chunks in again] == [draws(chunks) for chunks in recorded]
        assert contents(again) == contents(recorded)


def test_a_recorded_chunk_waits_for_all_its_groups_and_takes_no_other(build, until) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 3)
    collector, _ = build(engine, schedule=ChunkSchedule({0: ((3, 1), (0, 2))}, "recorded"))
    collector.start(0, 0)
    until(lambda: len(collector._buffer.ready()) == 3)
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            engine.let_go()

    assert draws([collector.next_groups(0, 0, poll, poll_s=0.01).groups]) == [[1, 3]]
    assert len(polls) >= 3
    assert draws([collector.next_groups(0, 2, lambda: None).groups]) == [[0, 2]]
    with pytest.raises(DataError, match="recorded has no PPO step 1"):
        collector.next_groups(1, 0, lambda: None)


@pytest.mark.parametrize(
    ("settings", "draw"),
    [
        ({"sampler": "ready_first"}, 4),
        ({"sampler": "ready_first", "max_lookahead_versions": 1, "max_buffered_rollouts": 12}, 8),
        # without a gate the buffer's 8 slots are the limit
        ({"sampler": "windowed"}, 8),
    ],
)
def test_chunks_of_a_run_that_ran_further_ahead_are_refused_at_once(build, until, settings: Any, draw: int) -> None:
    """The gate opens, and slots are freed, only when the step is over: it would wait for ever."""
    engine = FakeEngine(holds=lambda request: draw_of(request) == 2)
    within = ChunkSchedule({0: ((0, 1), (2, draw - 1))}, "recorded")
    collector, _ = build(engine, schedule=within, **settings)
    collector.start(0, 0)
    assert draws([collector.next_groups(0, 0, lambda: None).groups]) == [[0, 1]]

    def poll() -> None:
        if collector._pump.is_shut:
            engine.let_go()

    assert draws([collector.next_groups(0, 2, poll, poll_s=0.01).groups]) == [[2, draw - 1]]
    beyond = ChunkSchedule({0: ((0, 1), (2, draw))}, "recorded")
    collector, _ = build(schedule=beyond, **settings)
    collector.start(0, 0)
    assert draws([collector.next_groups(0, 0, lambda: None).groups]) == [[0, 1]]
    with pytest.raises(DataError, match=f"^recorded PPO step 0 trains draw {draw}, which this run does not start "):
        collector.next_groups(0, 2, lambda: None)


def test_a_gate_that_was_just_opened_is_not_shut_though_nobody_has_gone_through_yet(build, until) -> None:
    schedule = ChunkSchedule({0: ((0, 1, 2, 3),), 1: ((4, 5, 6, 7),)}, "recorded")
    collector, engine = build(schedule=schedule, sampler="ready_first")
    collector.start(0, 0)
    groups = collector.next_groups(0, 0, lambda: None).groups
    until(lambda: collector._pump.is_shut)
    go_on = threading.Event()
    collector._thread.call(lambda: go_on.wait(20))
    engine.update_weights([], 1)
    collector.publish_version(1)
    collector.release([group.draw for group in groups])
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            go_on.set()

    assert draws([collector.next_groups(1, 0, poll, poll_s=0.01).groups]) == [[4, 5, 6, 7]]
