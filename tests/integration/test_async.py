"""Generation ahead of training, through the whole loop: ages stay within the bound, and nothing waits for ever."""

import asyncio
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from draws import draw_of

import lightning_ppo as ppo
from lightning_ppo.errors import EngineDiedError, RolloutError
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.testing import FakeEngine

CORRECTED = {"importance_correction": "truncated"}
AHEAD = {"max_lookahead_versions": 1, "max_trajectory_age_steps": 1}


class Record(ppo.PPOCallback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.metrics: list[dict[str, float]] = []

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.rows += [(payload.chunk.ppo_step, row) for row in payload.chunk.rows]

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.metrics.append(payload.metrics)


def wait_for(engine: FakeEngine, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(engine.held) < count:
        assert time.monotonic() < deadline, engine.held
        time.sleep(0.001)


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "windowed", "weight_fifo"])
def test_no_row_is_older_than_it_may_be_and_none_is_trained_twice(make_run, sampler: str, in_flight: bool) -> None:
    record = Record()
    settings = {"sampler": sampler, "in_flight_weight_updates": in_flight, "min_groups_for_streaming_train": 1}
    run = make_run(
        4,
        fake=FakeEngine(delay_s=lambda request: request.seed % 5 / 200),
        rollout={**AHEAD, **settings},
        ppo_settings=CORRECTED,
        callbacks=[record],
    )
    run.fit()
    assert len(record.rows) == 4 * 4 * 2
    assert set(Counter(row.sample_id for _, row in record.rows).values()) == {1}
    ages = [step - int(row.policy_versions.min()) for step, row in record.rows]
    assert 0 <= min(ages) <= max(ages) <= 1
    logged = [metrics["rollout/policy_age_max"] for metrics in record.metrics]
    assert logged == [
        max(step - int(row.policy_versions.min()) for at, row in record.rows if at == step) for step in range(4)
    ]
    if not in_flight:
        assert all(len(set(row.policy_versions.tolist())) == 1 for _, row in record.rows)


# Pitfall 86.
def test_what_was_aborted_is_never_trained(make_run) -> None:
    held = ("draw0_g0", "draw0_g1")
    engine = FakeEngine(length=4, holds=lambda request: request.request_id in held)
    record = Record()
    rollout = {**AHEAD, "sampler": "ready_first"}
    run = make_run(5, fake=engine, rollout=rollout, ppo_settings=CORRECTED, callbacks=[record])
    run.fit()
    assert sorted(engine.cancelled)[:2] == list(held)
    rows = [(step, row) for step, row in record.rows if row.sample_id in held]
    assert len(rows) == 2
    for step, row in rows:
        assert step - int(row.policy_versions.min()) <= 1
        assert int(row.policy_versions.min()) >= 2, "of the second generation alone"
    assert {"draw0_g0_try1", "draw0_g1_try1"} <= {request.request_id for request in engine.requests}


# Pitfall 83.
def test_training_goes_on_while_a_rollout_is_stuck_in_its_reward(make_run) -> None:
    opened = threading.Event()

    async def reward(prompt: str, response: str) -> float:
        while prompt == "^zz=" and not opened.is_set():
            await asyncio.sleep(0.005)
        return 1.0

    class Opens(ppo.PPOCallback):
        def on_ppo_step_end(self, trainer, pl_module, payload):
            if payload.ppo_step == 1:
                opened.set()

    record = Record()
    prompts = [{"prompt": "^zz=" if row == 5 else f"^a{row}="} for row in range(24)]
    run = make_run(
        3,
        reward=reward,
        prompts=prompts,
        rollout={**AHEAD, "shuffle": False},
        ppo_settings=CORRECTED,
        callbacks=[record, Opens()],
    )
    run.fit()
    assert run.trainer.global_step == 3
    assert [step for step, row in record.rows if row.sample_id == "draw5_g0"] == [1]


@pytest.mark.parametrize("dies", [False, True])
def test_a_drain_that_cannot_end_ends_the_run(make_run, dies: bool) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 6)

    class Waits(ppo.PPOCallback):
        def on_before_refit(self, trainer, pl_module, payload):
            wait_for(engine, 2)
            if dies:
                threading.Timer(0.05, engine.die).start()

    timeout_s = 20.0 if dies else 0.3
    rollout = {**AHEAD, "in_flight_weight_updates": False, "timeout_s": timeout_s}
    run = make_run(2, fake=engine, rollout=rollout, ppo_settings=CORRECTED, callbacks=[Waits()])
    expected = EngineDiedError if dies else RolloutError
    with pytest.raises(expected) as raised:
        run.fit()
    if not dies:
        message = str(raised.value)
        assert message.startswith("new weights waited for timeout_s=0.3; still generating 2 responses [draw6_g0 (")
        assert "\n" not in message
    assert engine.versions == [0], "no weights under a response"
    assert engine.closed
    assert run.trainer.global_step == 0


NEVER = '''
from lightning_ppo.rollout.gated_samplers import InOrderSampler

class Never(InOrderSampler):
    """Admits nothing."""

    capabilities = InOrderSampler.capabilities

    def admit(self, version):
        return None
'''


def never(tmp_path: Path) -> str:
    path = tmp_path / "never.py"
    path.write_text(NEVER)
    return f"{path}:Never"


def test_a_sampler_that_never_admits_is_a_stall_with_nothing_in_flight(make_run, tmp_path) -> None:
    run = make_run(1, rollout={"sampler": never(tmp_path), "timeout_s": 0.3})
    with pytest.raises(RolloutError) as raised:
        run.fit()
    message = str(raised.value)
    assert message.startswith("no prompt group was finished for timeout_s=0.3; in flight: 0 [")
    assert "dispatch waits for the next policy version" in message
    assert run.fake.requests == []


def test_a_stall_that_may_only_warn_is_said_once_and_waited_out(make_run, caplog) -> None:
    engine = FakeEngine(holds=lambda request: draw_of(request) == 2)
    caplog.set_level(logging.WARNING, "lightning_ppo")

    class LetsGo(ppo.PPOCallback):
        def on_train_start(self, trainer, pl_module):
            def work() -> None:
                wait_for(engine, 2)
                deadline = time.monotonic() + 20
                while not stalls(caplog) and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(0.3)
                engine.let_go()

            threading.Thread(target=work, daemon=True).start()

    rollout = {"timeout_s": 0.2, "failures": FailureConfig(stall_action="warn")}
    run = make_run(1, fake=engine, rollout=rollout, callbacks=[LetsGo()])
    run.fit()
    assert run.trainer.global_step == 1
    (message,) = stalls(caplog)
    assert "draw 2 (row " in message
    assert "failures.stall_action=warn waits on" in message


def stalls(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "timeout_s" in record.getMessage()]


def test_long_training_is_no_stall(make_run) -> None:
    class Slow(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            time.sleep(0.6)

    run = make_run(2, rollout={"timeout_s": 0.5}, callbacks=[Slow()])
    run.fit()
    assert run.trainer.global_step == 2
