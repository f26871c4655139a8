"""Rollouts that fail, through the whole loop: tried again, given up within a budget, never trained as a zero."""

import os
import subprocess
import sys
import time
from ast import literal_eval
from typing import Any

import pytest
import torch
from draws import draw_of

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError, ConfigError, EngineError, RewardError, StepError
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.testing import FakeEngine

STREAM = {"min_groups_for_streaming_train": 1}
SKIP = FailureConfig(drop="skip", max_dropped_prompts=3, max_data_attempts=1, backoff_s=0.0)
REPLACE = FailureConfig(drop="replace", max_dropped_prompts=3, max_data_attempts=1, backoff_s=0.0)


class Record(ppo.PPOCallback):
    """Everything that was trained."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, tuple[int, ...], int]] = []
        self.metrics: list[dict[str, float]] = []
        self.rows: list[tuple[int, str, float]] = []
        self.batches: list[Any] = []
        self.chunk_rows: list[int] = []

    def on_chunk_ready(self, trainer, pl_module, payload):
        chunk = payload.chunk
        self.chunks.append((chunk.ppo_step, chunk.index, chunk.draws, chunk.groups_per_step))
        self.rows += [(chunk.ppo_step, row.sample_id, row.reward) for row in chunk.rows]

    def on_chunk_end(self, trainer, pl_module, payload):
        self.chunk_rows.append(len(payload.rows))

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.metrics.append(payload.metrics)
        self.batches.append(payload.batch)

    def trained(self, step: int) -> list[int]:
        return sorted({int(name.split("_")[0].removeprefix("draw")) for at, name, _ in self.rows if at == step})


class OneByOne(ppo.PPOCallback):
    """Lets one held group go after another, each once the last one's chunk is accumulated."""

    def __init__(self, engine: FakeEngine, groups: int) -> None:
        self.engine, self.groups = engine, groups

    def on_train_epoch_start(self, trainer, pl_module):
        self._release(trainer.current_epoch * self.groups)

    def on_chunk_end(self, trainer, pl_module, payload):
        chunk = payload.chunk
        if chunk.groups_dispatched < self.groups and not chunk.is_closing:
            self._release(chunk.ppo_step * self.groups + chunk.groups_dispatched)

    def _release(self, draw: int) -> None:
        names = [f"draw{draw}_g0", f"draw{draw}_g1"]
        deadline = time.monotonic() + 20
        while not set(names) <= set(self.engine.held):
            assert time.monotonic() < deadline, f"{names} are not held"
            time.sleep(0.001)
        for name in names:
            if name in self.engine.held:
                self.engine.let_go(name)


def failing_engine(*draws: int, error: type[Exception] = ValueError, **settings: Any) -> FakeEngine:
    """An engine that fails these draws with an error of the data, whatever the attempt."""
    return FakeEngine(fails=lambda request: error("no answer") if draw_of(request) in draws else None, **settings)


def one(prompt: str, response: str) -> float:
    return 1.0


# ------------------------------------------------------------------ retries


def test_a_failed_response_is_tried_again_and_changes_nothing(make_run) -> None:
    failed: set[str] = set()

    def fails(request: Any) -> Exception | None:
        name = request.request_id.split("_try")[0]
        if name in ("draw1_g1", "draw6_g0") and name not in failed:
            failed.add(name)
            return EngineError("HTTP 503")
        return None

    undisturbed, disturbed = make_run(3), make_run(3, fake=FakeEngine(fails=fails), rollout=backoff())
    undisturbed.fit()
    disturbed.fit()
    assert failed == {"draw1_g1", "draw6_g0"}
    asked = [request.request_id for request in disturbed.fake.requests]
    assert asked.count("draw1_g0") == asked.count("draw1_g1") == asked.count("draw1_g1_try1") == 1
    assert all(torch.equal(undisturbed.weights()[name], tensor) for name, tensor in disturbed.weights().items())


def backoff(**settings: Any) -> dict[str, Any]:
    return {"failures": FailureConfig(backoff_s=0.01, **settings)}


@pytest.mark.parametrize(("infra", "data", "ends"), [(4, 1, False), (5, 0, True), (0, 2, True)])
def test_infrastructure_and_data_have_budgets_of_their_own(make_run, infra: int, data: int, ends: bool) -> None:
    left = [EngineError("HTTP 503")] * infra + [ValueError("no answer")] * data

    def fails(request: Any) -> Exception | None:
        return left.pop() if left and request.request_id.startswith("draw2_g1") else None

    run = make_run(1, fake=FakeEngine(fails=fails), rollout=backoff())
    if ends:
        with pytest.raises((EngineError, ValueError)):
            run.fit()
    else:
        run.fit()
    tries = [request for request in run.fake.requests if request.request_id.startswith("draw2_g1")]
    assert len(tries) == infra + data + (not ends)
    assert not left
    assert run.trainer.global_step == (not ends)


def test_without_a_drop_budget_the_original_error_ends_the_run(make_run) -> None:
    cause = ZeroDivisionError("no answer")

    def reward(prompt: str, response: str) -> float:
        raise cause

    run = make_run(2, reward=reward, rollout=backoff())
    before = run.weights()
    with pytest.raises(RewardError) as raised:
        run.fit()
    assert raised.value.__cause__ is cause
    assert any("failures.drop=fail ends the run" in note for note in raised.value.__notes__)
    assert run.trainer.global_step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())


# ------------------------------------------------------------------ skip


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_closes_without_what_was_dropped_and_never_trains_a_zero(make_run, streams: bool) -> None:
    record = Record()
    rollout = {"failures": SKIP, **(STREAM if streams else {})}
    run = make_run(3, fake=failing_engine(1, 6, 7), reward=one, rollout=rollout, callbacks=[record])
    run.fit()
    assert [record.trained(step) for step in range(3)] == [[0, 2, 3], [4, 5], [8, 9, 10, 11]]
    assert {reward for _, _, reward in record.rows} == {1.0}
    assert len(record.rows) == len(set(record.rows)) == 2 * 9
    assert [metrics["rollout/reward_mean"] for metrics in record.metrics] == [1.0] * 3
    # the next step's rollouts may have failed by then
    assert record.metrics[-1]["rollout/dropped_prompts"] == 3
    assert record.metrics[-1]["rollout/retries"] == 0
    assert record.metrics[-1]["rollout/engine_restarts"] == 0
    assert [batch.num_sequences for batch in record.batches] == [6, 4, 8]
    assert run.trainer.global_step == 3
    skipped = run.data._last.position["stream"]["skipped"]
    assert [draw for draw, _ in skipped] == [1, 6, 7]
    assert all("ValueError: no answer" in reason for _, reason in skipped)
    assert run.data._last.position["stream"]["cursor"] == 12


def test_restarts_of_the_engine_are_a_metric(make_run) -> None:
    engine, record = FakeEngine(), Record()

    class Restart(ppo.PPOCallback):
        def on_ppo_step_end(self, trainer, pl_module, payload):
            engine.restarts += 2

    make_run(3, fake=engine, callbacks=[record, Restart()]).fit()
    assert [metrics["rollout/engine_restarts"] for metrics in record.metrics] == [0, 2, 4]


MODES: list[dict[str, Any]] = [
    {"normalize_advantages": "running"},
    {"normalize_advantages": "batch", "loss_level": "sequence"},
    {"normalize_advantages": "chunk"},
    {"normalize_advantages": "off", "truncated_responses": "mask"},
    {"kl_placement": "loss", "kl_coef": 0.1, "entropy_coef": 0.1},
    {"kl_placement": "reward", "kl_coef": 0.1, "bootstrap_truncated": True},
    {"old_logprobs": "rollout", "normalize_advantages": "chunk"},
    {"critic_warmup_steps": 1, "critic_ppo_epochs": 2, "critic_minibatches": 2},
]


@pytest.mark.parametrize("settings", MODES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_step_that_loses_its_last_group_after_the_others_were_handed_out(make_run, settings) -> None:
    """It closes on an empty chunk, and is the step that never had that group, to the last bit."""

    class Late(FakeEngine):
        async def generate(self, request: Any) -> Any:
            generation = await super().generate(request)
            if draw_of(request) == 3:
                raise ValueError("no answer")
            return generation

    results = []
    for groups in (4, 3):
        engine = Late(holds=lambda request: True)
        record = Record()
        rollout = {"num_prompts_per_step": groups, "failures": SKIP, **STREAM}
        callbacks = [OneByOne(engine, groups), record]
        run = make_run(1, fake=engine, rollout=rollout, ppo_settings=settings, callbacks=callbacks)
        run.fit()
        results.append((run, record))
    (short, record), (whole, expected) = results
    assert record.chunks == [(0, 0, (0,), 4), (0, 1, (1,), 4), (0, 2, (2,), 4), (0, 3, (), 3)]
    assert record.chunk_rows == [2, 2, 2, 0]
    assert expected.chunks == [(0, 0, (0,), 3), (0, 1, (1,), 3), (0, 2, (2,), 3)]
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, short.weights()[name]), name
    assert record.batches[0].num_chunks == expected.batches[0].num_chunks == 3
    timed = ("time/", "throughput/")
    ours, theirs = record.metrics[0], expected.metrics[0]
    assert (ours.pop("rollout/dropped_prompts"), theirs.pop("rollout/dropped_prompts")) == (1, 0)
    assert ours.keys() == theirs.keys()
    assert {k: v for k, v in ours.items() if not k.startswith(timed)} == {
        k: v for k, v in theirs.items() if not k.startswith(timed)
    }


def test_a_group_dropped_ahead_of_its_step_is_missing_there_and_nowhere_else(make_run) -> None:
    record = Record()
    run = make_run(
        3,
        fake=failing_engine(5),
        rollout={"failures": SKIP, "max_lookahead_versions": 1},
        ppo_settings={"importance_correction": "truncated"},
        callbacks=[record],
    )
    run.fit()
    assert [record.trained(step) for step in range(3)] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("size", "kept", "groups"), [(4, [4, 6, 7], 3), (5, [4, 6, 7], 4), (3, [4, 6, 7], 3), (2, [4, 6], 2)]
)
def test_a_step_that_lost_a_group_stays_short_after_a_resume(make_run, tmp_path, size, kept, groups) -> None:
    """Unless steps got so small that it has enough without."""
    path = tmp_path / "step1.ckpt"

    class SaveOnceDropped(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            pump = trainer.datamodule._generators.collector._pump
            deadline = time.monotonic() + 20
            while pump.dropped[1] == 0 and payload.chunk.ppo_step == 0:
                assert time.monotonic() < deadline
                time.sleep(0.001)

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)

    settings = {
        "rollout": {"failures": SKIP, "max_lookahead_versions": 1},
        "ppo_settings": {"importance_correction": "truncated"},
    }
    make_run(2, fake=failing_engine(5), callbacks=[SaveOnceDropped()], **settings).fit()
    record = Record()
    settings["rollout"] |= {"num_prompts_per_step": size, "min_groups_for_streaming_train": size}
    make_run(4, fake=failing_engine(5), callbacks=[record], **settings).fit(path)
    assert record.trained(1)[: len(kept)] == kept
    assert len(record.trained(1)) == groups
    assert len(record.trained(2)) == len(record.trained(3)) == size
    trained = [draw for step in (1, 2, 3) for draw in record.trained(step)]
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_that_lost_everything_is_an_error_before_any_update(make_run, step: int) -> None:
    class Boundary(ppo.PPOCallback):
        weights: dict[str, torch.Tensor]

        def on_train_epoch_start(self, trainer, pl_module):
            self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}

    boundary = Boundary()
    failures = FailureConfig(drop="skip", max_dropped_prompts=4, max_data_attempts=1, backoff_s=0.0)
    engine = failing_engine(*range(4 * step, 4 * step + 4))
    run = make_run(3, fake=engine, rollout={"failures": failures, **STREAM}, callbacks=[boundary])
    with pytest.raises(StepError) as raised:
        run.fit()
    message = str(raised.value)
    assert message.startswith(
        f"PPO step {step} lost all of its 4 prompts to failures.drop=skip, so that nothing was updated"
    )
    assert "\n" not in message
    assert run.trainer.global_step == step
    assert all(torch.equal(boundary.weights[name], tensor) for name, tensor in run.weights().items())
    assert run.fake.closed


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_that_lost_more_than_it_may_is_an_error_before_any_update(make_run, streams: bool) -> None:
    """Half of it must be left; what one of four prompts teaches is not what the user asked for."""
    lost = {"drop": "skip", "max_dropped_prompts": 3, "max_data_attempts": 1}
    stream = STREAM if streams else {}
    run = make_run(2, fake=failing_engine(4, 5, 7), rollout={"failures": FailureConfig(**lost), **stream})
    with pytest.raises(StepError) as raised:
        run.fit()
    assert str(raised.value) == (
        "PPO step 1 lost 3 of its 4 prompts to failures.drop=skip, and failures.min_step_fraction=0.5 keeps 2, so that "
        "nothing was updated; look at why they failed, or set failures.drop=replace"
    )
    assert run.trainer.global_step == 1
    record = Record()
    failures = FailureConfig(**lost, min_step_fraction=0.25)
    run = make_run(
        2, fake=failing_engine(4, 5, 7), rollout={"failures": failures, **stream}, reward=one, callbacks=[record]
    )
    run.fit()
    assert [record.trained(step) for step in range(2)] == [[0, 1, 2, 3], [6]]


# ------------------------------------------------------------------ replace


@pytest.mark.parametrize("streams", [False, True])
def test_the_next_prompt_takes_the_place_of_a_dropped_one(make_run, streams: bool) -> None:
    record = Record()
    rollout = {"failures": REPLACE, **(STREAM if streams else {})}
    run = make_run(3, fake=failing_engine(1, 4, 7), reward=one, rollout=rollout, callbacks=[record])
    run.fit()
    # Draw 4 takes the place of 1, and fails as well; so 5 does.
    assert [record.trained(step) for step in range(3)] == [[0, 2, 3, 5], [6, 8, 9, 10], [11, 12, 13, 14]]
    assert {size for *_, size in record.chunks} == {4}
    assert run.data._last.position["stream"]["cursor"] == 15
    assert sorted(draw for draw, _ in run.data._last.position["stream"]["skipped"]) == [1, 4, 7]


def test_a_replacement_keeps_the_step_that_it_is_for(make_run) -> None:
    record = Record()
    run = make_run(
        3,
        fake=failing_engine(5),
        rollout={"failures": REPLACE, "max_lookahead_versions": 1},
        ppo_settings={"importance_correction": "truncated"},
        callbacks=[record],
    )
    run.fit()
    assert record.trained(0) == [0, 1, 2, 3]
    # dispatched ahead: whichever draw was next when draw 5 failed
    second = record.trained(1)
    assert len(second) == 4
    assert {4, 6, 7} < set(second)
    assert len(record.trained(2)) == 4
    trained = [draw for step in range(3) for draw in record.trained(step)]
    assert sorted(trained) == [draw for draw in range(13) if draw != 5]


# ------------------------------------------------------------------ budgets


@pytest.mark.parametrize("failures", [SKIP, REPLACE], ids=["skip", "replace"])
def test_a_used_up_budget_ends_the_run_with_the_original_error(make_run, failures: FailureConfig) -> None:
    error = ValueError("no answer")
    engine = FakeEngine(fails=lambda request: error if draw_of(request) in (1, 2, 5, 6) else None)
    run = make_run(3, fake=engine, rollout={"failures": failures})
    with pytest.raises(ValueError, match="no answer") as raised:
        run.fit()
    assert raised.value is error
    assert any("failures.max_dropped_prompts=3 is used up as well" in note for note in error.__notes__)


def test_infrastructure_is_dropped_in_a_row_only(make_run) -> None:
    failures = FailureConfig(drop="skip", max_consecutive_dropped_prompts=1, max_infra_attempts=1, backoff_s=0.0)
    # one per step, with finished groups between: never two in a row
    record = Record()
    settings = {"failures": failures, "max_inflight_prompts": 1}
    run = make_run(4, fake=failing_engine(1, 5, 9, error=EngineError), rollout=settings, callbacks=[record])
    run.fit()
    assert [len(record.trained(step)) for step in range(4)] == [3, 3, 3, 4]
    run = make_run(4, fake=failing_engine(1, 2, error=EngineError), rollout=settings)
    with pytest.raises(EngineError, match="no answer"):
        run.fit()


def test_the_budget_counts_over_a_restart_and_a_skipped_prompt_stays_skipped(make_run, tmp_path) -> None:
    rollout = {"failures": FailureConfig(drop="skip", max_dropped_prompts=2, max_data_attempts=1, backoff_s=0.0)}
    first = make_run(1, fake=failing_engine(2), rollout=rollout)
    first.fit()
    checkpoint = tmp_path / "first.ckpt"
    first.trainer.save_checkpoint(checkpoint)
    record = Record()
    # what step 1 needs was generated before the first run ended
    second = make_run(3, fake=failing_engine(2, 9), rollout=rollout, callbacks=[record])
    second.fit(checkpoint)
    assert [record.trained(step) for step in (1, 2)] == [[4, 5, 6, 7], [8, 10, 11]]
    assert not [request for request in second.fake.requests if draw_of(request) == 2]
    third = make_run(3, fake=failing_engine(9, 10), rollout=rollout)
    with pytest.raises(ValueError, match="no answer") as raised:
        third.fit(checkpoint)
    assert any("failures.max_dropped_prompts=2 is used up" in note for note in raised.value.__notes__)


def test_a_damaged_budget_refuses_the_checkpoint(make_run, tmp_path) -> None:
    rollout = {"failures": SKIP}
    run = make_run(1, rollout=rollout)
    run.fit()
    path = tmp_path / "end.ckpt"
    run.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    (key,) = (key for key, value in saved.items() if isinstance(value, dict) and "prompts" in value)
    saved[key]["prompts"]["dropped"]["dropped_data"] = -1
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match="dropped"):
        make_run(2, rollout=rollout).fit(path)


# ------------------------------------------------------------------ set-up


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"sampler": "ready_first"}, "failures.drop=skip needs a sampler that gives every group its step"),
        (
            {"num_prompts_per_step": 1, "min_groups_for_streaming_train": 1},
            "failures.drop=skip leaves nothing of a step of one group; set failures.drop=replace",
        ),
    ],
)
def test_skip_is_refused_where_steps_cannot_be_short(make_run, rollout, message: str) -> None:
    run = make_run(1, rollout={"failures": SKIP, **rollout})
    with pytest.raises(ConfigError) as raised:
        run.fit()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert run.fake.spec is None, "before anything is started"


# ------------------------------------------------------------------ two ranks

SCRIPT = """
import os, sys
from datetime import timedelta
import lightning as L
import torch
import lightning_ppo as ppo
from lightning_ppo.testing import FakeEngine

policy, folder = sys.argv[1:]
torch.set_num_threads(1)

def draw_of(request):
    return int(request.request_id.split("_")[0].removeprefix("draw"))

class Engine(FakeEngine):
    async def generate(self, request):
        generation = await super().generate(request)
        if draw_of(request) >= 3:
            raise ValueError("no answer")
        return generation

engine = Engine(holds=lambda request: draw_of(request) == 3)
chunks, steps = [], []

class Rollouts(ppo.RolloutDataModule):
    def make_engine(self):
        return engine

class Late(ppo.PPOCallback):
    def on_chunk_ready(self, trainer, pl_module, payload):
        chunk = payload.chunk
        chunks.append((chunk.draws, len(chunk.rows), chunk.groups_per_step))
    def on_chunk_end(self, trainer, pl_module, payload):
        if payload.chunk.groups_dispatched == 3 and trainer.is_global_zero:
            engine.let_go()
    def on_ppo_step_end(self, trainer, pl_module, payload):
        total = float(sum(parameter.double().sum() for parameter in pl_module.parameters()))
        steps.append((payload.batch.num_sequences, total))

failures = ppo.FailureConfig(drop="skip", max_dropped_prompts=9, max_data_attempts=1, backoff_s=0.0)
data = Rollouts(
    [{"prompt": "^ab="}, {"prompt": "^bc="}, {"prompt": "^cd="}, {"prompt": "^de="}],
    lambda prompt, response: float(len(response)),
    rollout=ppo.RolloutConfig(
        num_prompts_per_step=4, num_generations_per_prompt=2, min_groups_for_streaming_train=1,
        max_response_tokens=8, timeout_s=30.0, failures=failures,
    ),
    local=ppo.LocalEngineConfig(trainer_threads=None),
)
trainer = L.Trainer(
    accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, callbacks=[Late()], default_root_dir=folder,
    strategy=ppo.StreamingPPOStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)),
)
try:
    trainer.fit(ppo.PPOModule(policy), data)
except Exception as error:
    with open(f"{folder}/rank{os.environ.get('LOCAL_RANK', 0)}", "w") as file:
        file.write(repr((chunks, steps, f"{type(error).__name__}: {error}")))
    raise
"""


@pytest.mark.slow
def test_two_ranks_close_on_an_empty_chunk_and_leave_a_lost_step_together(policy_folder, tmp_path) -> None:
    script = tmp_path / "drops.py"
    script.write_text(SCRIPT)
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), policy_folder, str(tmp_path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    deadline = time.monotonic() + 60
    # rank 1 is not waited for by whoever started it
    while not (tmp_path / "rank1").exists():
        assert time.monotonic() < deadline, result.stderr[-3000:]
        time.sleep(0.1)
    first, second = (literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1))
    assert first == second, "each rank has its own rows, and as many; the models are the same"
    chunks, ((sequences, _),), error = first
    assert sorted(draw for draws, _, _ in chunks[:-1] for draw in draws) == [0, 1, 2]
    assert {size for _, _, size in chunks[:-1]} == {4}
    assert chunks[-1] == ((), 0, 3)
    assert sequences == 6
    assert error.startswith("StepError: PPO step 1 lost all of its 4 prompts")
