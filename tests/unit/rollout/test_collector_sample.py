import threading
from functools import partial
from typing import Any

import pytest

from lightning_ppo.errors import EngineDiedError, EngineError, RewardError, RolloutError
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.watchdog import Watchdog
from lightning_ppo.testing import FakeEngine, make_prompt

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=(1,))
PROMPTS = [make_prompt(row=row, token_ids=(2, 6 + row, 3), answer="a") for row in range(3)]


def sample(
    collector: Any, prompts: Any = PROMPTS, namespace: str = "validate", timeout_s: float = 20.0, **more: Any
) -> Any:
    return collector.jobs.sample(prompts, seed_namespace=namespace, sampling=GREEDY, timeout_s=timeout_s, **more)


def texts(rows: Any) -> list[tuple]:
    return [(row.sample_id, row.prompt_ids.tolist(), row.response_ids.tolist(), row.reward) for row in rows]


def test_responses_come_prompt_by_prompt(build) -> None:
    collector, engine = build(FakeEngine(delay_s=lambda request: 0.01 if request.prompt_ids[1] == 6 else 0.0))
    rows = sample(collector, num_samples=2)
    assert [row.sample_id for row in rows] == [f"validate_row{row}_g{index}" for row in range(3) for index in range(2)]
    assert [row.prompt_ids.tolist() for row in rows] == [[2, 6 + row, 3] for row in range(3) for _ in range(2)]
    assert {request.sampling for request in engine.requests} == {GREEDY}
    assert len({request.seed for request in engine.requests}) == 6


def test_seeds_depend_on_run_namespace_and_row_only(build) -> None:
    collector, _ = build()
    rows = texts(sample(collector))
    assert texts(sample(collector)) == rows
    assert texts(sample(collector, PROMPTS[::-1])) == rows[::-1]
    assert [row[2] for row in texts(sample(collector, namespace="predict"))] != [row[2] for row in rows]
    assert [row[2] for row in texts(sample(build(seed=1)[0]))] != [row[2] for row in rows]


def test_a_repeated_row_is_answered_twice(build) -> None:
    collector, engine = build(FakeEngine(holds=lambda request: True))

    def poll() -> None:
        if len(engine.held) == 2:
            engine.let_go()

    one, two = sample(collector, [PROMPTS[0], PROMPTS[0]], poll=poll, poll_s=0.01)
    assert texts([one]) == texts([two])


def test_nothing_to_sample(build) -> None:
    assert sample(build()[0], []) == []


def test_it_disturbs_no_rollouts_and_is_disturbed_by_none(build, train, until) -> None:
    quiet, engine = build()
    alone = train(quiet, engine, range(2))
    before = texts(sample(quiet))

    held = FakeEngine(holds=lambda request: request.request_id.startswith("draw"))
    collector, _ = build(held)
    assert texts(sample(collector)) == before, "works before rollouts start"
    collector.start(0, 0)
    until(lambda: len(held.held) == 8)
    state, occupied = collector.state_dict()["stream"], collector._buffer.occupied
    assert texts(sample(collector)) == before, "works while they run"
    assert (collector.state_dict()["stream"], collector._buffer.occupied) == (state, occupied)
    assert len(held.held) == 8
    held.let_go()
    groups = collector.next_groups(0, 0, lambda: None).groups
    assert [texts(group.trajectories) for group in groups] == [texts(group.trajectories) for group in alone[0][0]]
    seeds = [request.seed for request in held.requests]
    assert len(set(seeds)) == 8 + 3, "no seed of training is used for validation"


def test_the_namespace_of_training_is_refused(build) -> None:
    with pytest.raises(ValueError, match="seed_namespace=train belongs to training"):
        sample(build()[0], namespace="train")


def test_its_failure_leaves_the_rollouts_alone(build) -> None:
    def reward(prompt):
        if prompt == "^0=":
            raise KeyError("bad row")
        return 1.0

    collector, _ = build(reward=reward)
    collector.start(0, 0)
    with pytest.raises(RewardError, match="prompt row 9"):
        sample(collector, [*PROMPTS, make_prompt(row=9, token_ids=(2, 32, 3))])
    assert len(collector.next_groups(0, 0, lambda: None).groups) == 4


def test_a_stall_cancels_what_is_left(build, until) -> None:
    engine = FakeEngine(holds=lambda request: request.prompt_ids[1] == 7)
    collector, _ = build(engine)
    with pytest.raises(RolloutError) as raised:
        sample(collector, timeout_s=0.1)
    assert str(raised.value) == (
        "no validate response was finished for timeout_s=0.1; 2 of 3 are, being sampled: 1 responses, being rewarded: "
        "0; look at the engine's log, or set a longer timeout_s"
    )
    until(lambda: len(engine.cancelled) == 1)
    assert engine.held == ()


def test_every_finished_response_starts_the_deadline_anew(build, monkeypatch) -> None:
    """As in training: a job of a thousand responses may take as long as it likes, if it gets on."""
    now_s, before = [0.0], [0]
    monkeypatch.setattr("lightning_ppo.rollout.sample_job.Watchdog", partial(Watchdog, clock=lambda: now_s[0]))
    engine, rewarded = FakeEngine(holds=lambda request: True), []
    collector, _ = build(engine, reward=lambda response: rewarded.append(response) or 1.0)

    def poll() -> None:
        # the last one is finished, and was so at the last look: the next one follows, most of the deadline later
        if len(engine.held) == 3 - len(rewarded) and before[0] == len(rewarded):
            now_s[0] += 8.0
            engine.let_go(engine.held[0])
        before[0] = len(rewarded)

    assert len(sample(collector, timeout_s=10.0, poll=poll, poll_s=0.02)) == 3
    assert now_s[0] == 24.0


def test_a_stall_is_a_warning_if_that_is_what_stalls_are(build, caplog) -> None:
    engine = FakeEngine(holds=lambda request: True)
    warn = FailureConfig(stall_action="warn")
    collector, _ = build(engine, failures=warn)

    def poll() -> None:
        if "waits on" in caplog.text:
            engine.let_go()

    assert len(sample(collector, timeout_s=0.1, poll=poll, poll_s=0.02)) == 3
    assert "no validate response was finished for timeout_s=0.1; 0 of 3 are" in caplog.text


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0]] * 3], ids=["rows", "one row thrice"])
def test_a_failing_response_is_tried_again_alone_with_its_seed(build, prompts: Any) -> None:
    alone = texts(sample(build()[0], prompts))
    engine = FakeEngine(fails=lambda request: EngineError("HTTP 503") if request.request_id[-5:-1] != "_try" else None)
    collector, _ = build(engine, failures=FailureConfig(backoff_s=0.0, max_infra_attempts=2))
    assert texts(sample(collector, prompts)) == alone
    names = [request.request_id for request in engine.requests]
    assert sorted(names) == sorted(f"validate1_{place}{end}" for place in range(3) for end in ("", "_try1"))
    assert {request.request_id[9]: request.seed for request in engine.requests[:3]} == {
        request.request_id[9]: request.seed for request in engine.requests[3:]
    }


@pytest.mark.parametrize(("settings", "asked"), [({"max_infra_attempts": 4}, 4), ({"max_data_attempts": 1}, 1)])
def test_attempts_are_counted_as_in_training_and_no_response_is_dropped(build, settings: Any, asked: int) -> None:
    error = EngineError("HTTP 503") if "max_infra_attempts" in settings else KeyError("bad row")
    failures = FailureConfig(backoff_s=0.0, drop="replace", max_dropped_prompts=9, **settings)
    engine = FakeEngine(fails=lambda request: error)
    collector, _ = build(engine, failures=failures)
    with pytest.raises(type(error)) as raised:
        sample(collector, PROMPTS[2:])
    assert raised.value is error
    assert len(engine.requests) == asked
    (kind,) = settings
    assert error.__notes__ == [f"rollout of validate row 2, response 0: this used up failures.{kind}={asked}"]


def test_poll_and_health_are_asked_while_it_waits(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)

    def interrupt() -> None:
        if len(engine.held) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(collector, poll=interrupt, poll_s=0.01)
    until(lambda: len(engine.cancelled) == 3)

    def die() -> None:
        if len(engine.held) == 3:
            engine.die()

    with pytest.raises(EngineDiedError):
        sample(collector, poll=die, poll_s=0.01)


def test_closing_ends_it(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    closer = threading.Thread(target=lambda: (until(lambda: len(engine.held) == 3), collector.close()), daemon=True)
    closer.start()
    with pytest.raises(RolloutError, match="closed before validate responses were finished"):
        sample(collector, poll_s=0.01)
    closer.join(10)
    with pytest.raises(RolloutError, match="is closed"):
        sample(collector)
