"""Lightning's own callbacks and loggers work as they are, and count PPO steps."""

import csv
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_ppo as ppo
from lightning_ppo.schedulers import LinearWarmupDecay
from lightning_ppo.testing import FakeEngine

VALIDATION = [{"prompt": "^ab="}, {"prompt": "^cd="}]


def by_version(scores):
    """An engine and a reward: validation after the n-th update scores `scores[n]`, training always 0.5."""
    fake = FakeEngine(length=4)

    def reward(prompt, response):
        return scores[min(fake.version, len(scores) - 1)] if prompt in ("^ab=", "^cd=") else 0.5

    return {"fake": fake, "reward": reward, "validation_prompts": VALIDATION}


def rows(run, *columns):
    """The CSV log's rows that have all of these columns."""
    with open(Path(run.trainer.log_dir) / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row.get(column) for column in columns)]


@pytest.mark.parametrize("every", [1, 2])
def test_model_checkpoint_keeps_the_best_validation_reward(make_run, cut, tmp_path, every):
    saver = ModelCheckpoint(
        tmp_path / "saved",
        monitor="val/reward_mean",
        mode="max",
        save_top_k=1,
        filename="{step}-{val/reward_mean:.2f}",
        auto_insert_metric_name=False,
    )
    run = make_run(
        4,
        rollout=cut(2, 2),
        callbacks=[saver],
        enable_checkpointing=True,
        check_val_every_n_epoch=every,
        **by_version([0.0, 0.2, 0.9, 0.1, 0.3]),
    )
    run.fit()
    assert Path(saver.best_model_path).name == "2-0.90.ckpt"
    assert [path.name for path in (tmp_path / "saved").rglob("*.ckpt")] == ["2-0.90.ckpt"]
    assert float(saver.best_model_score) == pytest.approx(0.9)
    saved = torch.load(saver.best_model_path, weights_only=True)
    assert saved["global_step"] == saved["lightning_ppo"]["ppo_step"] == 2


def test_model_checkpoint_on_a_training_metric(make_run, tmp_path):
    saver = ModelCheckpoint(
        tmp_path / "saved", monitor="rollout/reward_mean", mode="max", save_top_k=2, filename="{step}"
    )
    run = make_run(4, callbacks=[saver], enable_checkpointing=True)
    run.fit()
    assert len(list((tmp_path / "saved").iterdir())) == 2
    assert float(saver.best_model_score) == pytest.approx(max(float(v) for v in saver.best_k_models.values()))


def test_last_checkpoint_as_a_link(make_run, tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_last="link", save_top_k=1)
    make_run(2, callbacks=[saver], enable_checkpointing=True).fit()
    last = tmp_path / "saved" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2


def test_default_checkpoint_callback(make_run, tmp_path):
    """Without a callback of one's own Lightning keeps the last step; nothing has to be switched off for us."""
    run = make_run(
        2, rollout={"min_groups_for_streaming_train": 2}, enable_checkpointing=True, logger=CSVLogger(tmp_path)
    )
    run.fit()
    assert torch.load(run.trainer.checkpoint_callback.best_model_path, weights_only=True)["global_step"] == 2


def test_learning_rate_monitor_counts_ppo_steps(make_run, cut, tmp_path):
    schedule = partial(LinearWarmupDecay, total_steps=10)
    run = make_run(
        3,
        rollout=cut(2, 1, 1),
        ppo_settings={"critic_ppo_epochs": 2},
        module={"policy_scheduler": schedule, "critic_scheduler": schedule},
        callbacks=[LearningRateMonitor(logging_interval="step")],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    run.fit()
    # the monitor looks when a step begins
    logged = {(int(row["step"]), round(float(row["policy/lr"]) / 6e-4, 6)) for row in rows(run, "policy/lr")}
    monitored = next(value for value in run.trainer.callbacks if isinstance(value, LearningRateMonitor)).lrs
    assert {"policy/lr", "critic/lr"} <= set(monitored)
    assert {step for step, _ in logged} == {0, 1, 2}
    assert {(0, 1.0), (1, 0.9), (2, 0.8)} <= logged


def test_metrics_have_one_point_per_ppo_step(make_run, cut, tmp_path):
    run = make_run(
        3, rollout=cut(2, 1, 1), logger=CSVLogger(tmp_path), log_every_n_steps=1, validation_prompts=VALIDATION
    )
    run.fit()
    for name in ("policy/loss", "critic/loss", "rollout/reward_mean", "time/step_s", "val/reward_mean"):
        assert [int(row["step"]) for row in rows(run, name)] == [0, 1, 2], name


def test_early_stopping_on_the_validation_reward(make_run):
    stopper = EarlyStopping("val/reward_mean", mode="max", patience=2, min_delta=0.0)
    run = make_run(8, callbacks=[stopper], **by_version([0.0, 0.5, 0.9, 0.4, 0.3, 1.0]))
    run.fit()
    assert run.trainer.global_step == run.trainer.current_epoch == 4
    assert stopper.stopped_epoch == 3
    assert run.fake.closed


def test_early_stopping_on_a_training_metric(make_run, cut):
    stopper = EarlyStopping("rollout/reward_mean", mode="max", patience=1, check_on_train_epoch_end=True)
    run = make_run(8, rollout=cut(2, 2), callbacks=[stopper], reward=lambda prompt, response: 0.5)
    run.fit()
    assert run.trainer.global_step == 2


def test_throughput_monitor(make_run, cut, tmp_path):
    """One point per PPO step; the time includes the wait for rollouts."""
    monitor = ThroughputMonitor(
        batch_size_fn=lambda chunk: len(chunk.rows),
        length_fn=lambda chunk: sum(row.num_tokens for row in chunk.rows),
        window_size=2,
    )
    run = make_run(4, rollout=cut(2, 2), callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.module.flops_per_batch = None
    run.fit()
    points = rows(run, "train/samples")
    assert [int(float(row["train/samples"])) for row in points] == [8, 16, 24, 32]
    assert [int(row["step"]) for row in points] == [0, 1, 2, 3]
    assert float(rows(run, "train/device/samples_per_sec")[-1]["train/device/samples_per_sec"]) > 0


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer_ends_the_run_at_the_end_of_a_ppo_step(make_run, cut, interval):
    """`interval="step"`, which is also what `Trainer(max_time=...)` makes, looks after every chunk."""
    timer = Timer(duration=timedelta(milliseconds=1), interval=interval)
    run = make_run(5, rollout=cut(2, 1, 1), callbacks=[timer])
    run.fit()
    assert run.trainer.global_step == run.trainer.current_epoch == 1
    assert int(run.module.policy.completed_steps) == int(run.module.critic.completed_steps) == 1
    assert timer.time_elapsed("train") > 0
    assert run.fake.closed


def test_max_time(make_run, cut, tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    run = make_run(
        5, rollout=cut(2, 1, 1), callbacks=[saver], enable_checkpointing=True, max_time=timedelta(milliseconds=1)
    )
    run.fit()
    assert torch.load(saver.best_model_path, weights_only=True)["global_step"] == 1


def test_tensorboard_scalars_have_the_ppo_step_as_x(make_run, cut, tmp_path):
    class Own(ppo.PPOCallback):
        def on_critic_epoch_end(self, trainer, pl_module, payload):
            self.log("own/epoch", float(payload.epoch), on_step=False, on_epoch=True, batch_size=1)

    run = make_run(
        3,
        rollout=cut(2, 1, 1),
        callbacks=[Own()],
        logger=TensorBoardLogger(tmp_path, default_hp_metric=False),
        log_every_n_steps=1,
        validation_prompts=VALIDATION,
        num_sanity_val_steps=1,
    )
    run.fit()
    events = EventAccumulator(run.trainer.log_dir)
    events.Reload()
    for name in (
        "policy/loss",
        "policy/grad_norm",
        "policy/lr",
        "critic/loss",
        "critic/explained_variance",
        "rollout/reward_mean",
        "rollout/response_length",
        "time/wait_s",
        "time/critic_s",
        "throughput/response_tokens_per_s",
        "val/reward_mean",
        "own/epoch",
    ):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2], name
    assert [event.value for event in events.Scalars("step/chunks")] == [3, 3, 3]


def test_progress_bar_of_lightning(make_run, cut):
    run = make_run(
        2, rollout=cut(2, 2), callbacks=[TQDMProgressBar()], enable_progress_bar=True, validation_prompts=VALIDATION
    )
    run.fit()
    assert run.trainer.global_step == 2


def test_profiler_names_our_hooks(make_run, tmp_path):
    class Own(ppo.PPOCallback):
        pass

    run = make_run(1, callbacks=[Own()], profiler=SimpleProfiler(tmp_path, "profile"))
    run.fit()
    actions = run.trainer.profiler.recorded_durations
    assert any(
        name.startswith("[Callback]") and ".Own." in name and name.endswith("on_critic_epoch_end") for name in actions
    )
    assert "[_TrainingEpochLoop].train_dataloader_next" in actions
