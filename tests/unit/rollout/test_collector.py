import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from draws import draw_of

from lightning_ppo.errors import ConfigError, RolloutError
from lightning_ppo.rollout.stream import sample_seed
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


def test_a_full_batch_is_the_next_draws_in_order_whatever_finishes_first(build, train) -> None:
    delayed, engine = build(FakeEngine(delay_s=lambda request: 0.02 - 0.002 * draw_of(request)))
    steps = train(delayed, engine, range(3))
    assert [draws(chunks) for chunks in steps] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    prompt, engine = build()
    assert contents(steps) == contents(train(prompt, engine, range(3)))


def test_a_group_holds_what_the_engine_and_the_reward_said(build, train, tokenizer) -> None:
    engine = FakeEngine(length=lambda request: 3 if draw_of(request) % 2 else 9)
    collector, _ = build(engine, reward=lambda response, answer: len(response) + ord(answer) / 1000)
    ((group, odd, *_),) = train(collector, engine, range(1))[0]
    assert [row.sample_id for row in group.trajectories] == ["draw0_g0", "draw0_g1"]
    assert group.prompt.text == "^a="
    first, second = group.trajectories
    assert first.prompt_ids.tolist() == [2, 6, 3]
    assert first.prompt_ids.dtype == first.response_ids.dtype == first.policy_versions.dtype == torch.int64
    assert first.rollout_logprobs.dtype == torch.float32
    # Pitfall 61: the mask covers generated tokens and nothing of the prompt.
    assert first.response_mask.tolist() == [True] * len(first.response_ids)
    assert first.truncated
    assert len(first.response_ids) == 6
    assert first.response_ids.tolist() != second.response_ids.tolist(), "every response has a seed of its own"
    stopped = odd.trajectories[0]
    assert (stopped.finish_reason, stopped.response_ids[-1].item()) == ("stop", 1)
    assert stopped.response_text == tokenizer.decode(stopped.response_ids[:-1].tolist(), skip_special_tokens=True)
    assert stopped.reward == pytest.approx(len(stopped.response_text) + ord("b") / 1000)
    seeds = {request.request_id: request.seed for request in engine.requests}
    assert seeds["draw2_g1"] == sample_seed(0, 2, 1)
    assert {request.sampling.max_tokens for request in engine.requests} == {6}


@pytest.mark.parametrize("sampler", ["in_order", "ready_first"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_any_number_of_steps(build, train, sampler: str, steps: int) -> None:
    # Pitfalls 88 (no rollouts follow the last step) and 76 (nothing is dispatched at lookahead 0).
    collector, engine = build(sampler=sampler, max_inflight_prompts=1, min_groups_for_streaming_train=1)
    seen = train(collector, engine, range(steps))
    assert sorted(all_draws(seen)) == list(range(4 * steps))


# Pitfall 79.
def test_a_data_set_of_one_and_a_half_batches_lasts_for_ever(build, train) -> None:
    collector, engine = build(rows=6, shuffle=True)
    rows = [group.prompt.row for chunks in train(collector, engine, range(6)) for chunk in chunks for group in chunk]
    assert Counter(rows) == dict.fromkeys(range(6), 4)
    assert all(sorted(rows[start : start + 6]) == list(range(6)) for start in range(0, 24, 6))


def test_data_set_smaller_than_one_group_of_prompts(build, train) -> None:
    collector, engine = build(rows=1)
    (first, *_), *_ = train(collector, engine, range(2))
    assert [group.prompt.row for group in first] == [0, 0, 0, 0]
    texts = {tuple(row.response_ids.tolist()) for group in first for row in group.trajectories}
    assert len(texts) > 1, "the same row gets new seeds at every draw"


def test_streaming_takes_finished_groups_and_defers_a_short_tail(build, until) -> None:
    collector, engine = build(
        FakeEngine(holds=lambda request: True),
        num_prompts_per_step=8,
        num_generations_per_prompt=1,
        min_groups_for_streaming_train=4,
    )
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)
    for draw in (7, 1, 4, 2):
        engine.let_go(f"draw{draw}_g0")
    assert draws([collector.next_groups(0, 0, lambda: None).groups]) == [[1, 2, 4, 7]]
    # Three of four are finished: 3 < min(4, remaining), so the rest comes as one chunk.
    for draw in (0, 3, 5):
        engine.let_go(f"draw{draw}_g0")
    until(lambda: len(collector._buffer.ready()) == 3)
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            engine.let_go()

    assert draws([collector.next_groups(0, 0, poll, poll_s=0.01).groups]) == [[0, 3, 5, 6]]
    assert len(polls) >= 3


def test_chunks_are_aligned(build, until) -> None:
    collector, engine = build(
        FakeEngine(holds=lambda request: draw_of(request) > 2),
        num_generations_per_prompt=1,
        min_groups_for_streaming_train=1,
        align=2,
    )
    collector.start(0, 0)
    until(lambda: len(engine.requests) == 4)
    assert draws([collector.next_groups(0, 0, lambda: None).groups]) == [[0, 1]]
    engine.let_go()
    assert draws([collector.next_groups(0, 2, lambda: None).groups]) == [[2, 3]]


def test_a_commit_wakes_the_trainer_without_polling(build, until) -> None:
    collector, engine = build(FakeEngine(holds=lambda request: True), timeout_s=3600)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)
    polls: list[int] = []
    found: list[int] = []

    def trainer() -> None:
        # With the next poll an hour away only the commit itself can end this wait.
        found.append(len(collector.next_groups(0, 0, lambda: polls.append(1), poll_s=3600).groups))

    thread = threading.Thread(target=trainer, daemon=True)
    thread.start()
    until(lambda: polls == [1])
    time.sleep(0.02)
    engine.let_go()
    thread.join(10)
    assert (found, polls) == ([4], [1])


# Pitfall 77.
def test_groups_that_a_step_does_not_need_stay_for_the_next(build, until) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) >= 10)
    collector, _ = build(engine, sampler="ready_first", max_lookahead_versions=2, num_generations_per_prompt=1)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 2 and len(collector._buffer.ready()) == 10)
    assert draws([collector.next_groups(0, 0, lambda: None).groups]) == [[0, 1, 2, 3]]
    assert [group.draw for group in collector._buffer.ready()] == [4, 5, 6, 7, 8, 9]
    assert draws([collector.next_groups(1, 0, lambda: None).groups]) == [[4, 5, 6, 7]]


# Pitfall 80.
def test_a_buffer_that_would_deadlock_is_rejected_with_the_number(build) -> None:
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=7 .*deadlock.* = 8"):
        build(max_lookahead_versions=1, max_buffered_rollouts=7)


def test_the_instantiated_sampler_is_asked_again(build, monkeypatch) -> None:
    from lightning_ppo.rollout.samplers import InOrderSampler

    monkeypatch.setattr(InOrderSampler, "required_capacity", lambda self, size: 25 * size)
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=8 .*deadlock; set >= 100"):
        build()


def test_step_that_does_not_divide_is_rejected(build) -> None:
    with pytest.raises(ConfigError, match="set a multiple of 3"):
        build(align=3)


# Pitfall 73: the trainer is slow, generation runs ahead as far as it may.
@pytest.mark.parametrize(("window", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_start_version_of_every_trained_group(build, train, until, window: int, expected: list[int]) -> None:
    collector, engine = build(max_lookahead_versions=window)

    def until_ahead() -> None:
        version = engine.version
        until(lambda: len(engine.requests) == 2 * 4 * (version + window + 1))

    steps = train(collector, engine, range(4), between=until_ahead)
    assert [{group.start_version for chunk in chunks for group in chunk} for chunks in steps] == [{v} for v in expected]
    assert [{group.target_step for chunk in chunks for group in chunk} for chunks in steps] == [{s} for s in range(4)]


def test_the_gate_opens_with_the_version_and_not_before(build, until) -> None:
    collector, engine = build()
    collector.start(0, 0)
    (*chunk,) = collector.next_groups(0, 0, lambda: None).groups
    until(lambda: collector._pump.waiting_for == "the next policy version")
    assert max(map(draw_of, engine.requests)) == 3
    collector.publish_version(1)
    until(lambda: len(engine.requests) == 16)
    assert collector._buffer.occupied == 8, "rows in training hold their slots while the next step generates"
    collector.release([group.draw for group in chunk])
    assert collector._buffer.occupied == 4


def test_with_the_smallest_buffer_generation_waits_for_the_release(build, until) -> None:
    collector, engine = build(max_buffered_rollouts=4)
    collector.start(0, 0)
    groups = collector.next_groups(0, 0, lambda: None).groups
    collector.publish_version(1)
    until(lambda: collector._pump.waiting_for == "a buffer slot")
    assert len(engine.requests) == 8
    collector.release([group.draw for group in groups[:1]])
    until(lambda: len(engine.requests) == 10)


def test_at_most_so_many_groups_are_generated_at_once(build, until) -> None:
    collector, engine = build(FakeEngine(holds=lambda request: True), max_inflight_prompts=2)
    collector.start(0, 0)
    for finished in range(0, 4, 2):
        until(lambda: len(engine.held) == 4)
        assert len(engine.requests) == 2 * (finished + 2)
        assert collector._pump.waiting_for in ("an in-flight permit", "the next policy version")
        engine.let_go()
    assert len(collector.next_groups(0, 0, lambda: None).groups) == 4


def test_versions_of_a_response_that_was_in_flight_during_a_refit(build, until) -> None:
    engine = FakeEngine(length=4, holds=lambda request: draw_of(request) >= 4)
    collector, _ = build(engine, max_lookahead_versions=1)
    collector.start(0, 0)
    collector.next_groups(0, 0, lambda: None)
    until(lambda: len(engine.held) == 8)
    engine.update_weights([], 1)
    collector.publish_version(1)
    engine.let_go()
    (group, *_) = collector.next_groups(1, 0, lambda: None).groups
    assert (group.start_version, group.end_version) == (0, 1)
    assert group.trajectories[0].policy_versions.tolist() == [0, 0, 1, 1]


def test_groups_of_a_failed_step_are_trained_again_from_their_payload(build) -> None:
    failed, _ = build()
    failed.start(0, 0)
    first = failed.next_groups(0, 0, lambda: None).groups
    state = failed.state_dict()
    failed.close()
    assert state["stream"]["cursor"] == 0
    again, engine = build()
    again.load_state_dict(state)
    again.start(0, 0)
    groups = again.next_groups(0, 0, lambda: None).groups
    assert [group.draw for group in groups] == [group.draw for group in first]
    for group, before in zip(groups, first, strict=True):
        for new, old in zip(group.trajectories, before.trajectories, strict=True):
            assert torch.equal(new.response_ids, old.response_ids)
            assert torch.equal(new.rollout_logprobs, old.rollout_logprobs)
    assert not engine.requests


def test_only_claimed_groups_can_be_released(build) -> None:
    collector, _ = build()
    collector.start(0, 0)
    collector.next_groups(0, 0, lambda: None)
    with pytest.raises(ValueError, match="are not being trained"):
        collector.release([0, 4])
    collector.release([0, 1, 2, 3])


def test_misuse_is_named(build) -> None:
    collector, _ = build()
    with pytest.raises(RolloutError, match="call start first"):
        collector.next_groups(0, 0, lambda: None)
    collector.start(0, 0)
    with pytest.raises(RolloutError, match="started already"):
        collector.start(0, 0)
    with pytest.raises(ValueError, match=r"remaining=-1 is not in 1\.\.4"):
        collector.next_groups(0, 5, lambda: None)
