"""global_step, current_epoch, schedules and checkpoint cadence all count PPO steps."""

from functools import partial

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_ppo as ppo
from lightning_ppo.schedulers import LinearWarmupDecay

STREAMING = {"min_groups_for_streaming_train": 1}


class Trace(ppo.PPOCallback):
    def __init__(self):
        self.chunks, self.after_step, self.epochs, self.rates = [], [], [], []

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.chunks.append((payload.chunk.ppo_step, payload.chunk.index, payload.chunk.draws))

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.after_step.append((payload.ppo_step, trainer.global_step, trainer.current_epoch))
        self.rates.append(tuple(pl_module.learning_rates().values()))

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append((trainer.global_step, trainer.current_epoch + 1))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("rollout", [{}, STREAMING])
def test_every_counter_counts_ppo_steps(make_run, steps, rollout):
    """Pitfalls 88, 104, 110: k epochs are k PPO steps, whatever the chunks and critic epochs."""
    trace = Trace()
    run = make_run(steps, rollout=rollout, ppo_settings={"critic_ppo_epochs": 3}, callbacks=[trace])
    run.fit()
    assert run.trainer.global_step == run.trainer.current_epoch == steps
    assert trace.after_step == [(k + 1, k + 1, k) for k in range(steps)]
    assert trace.epochs == [(k + 1, k + 1) for k in range(steps)]
    assert run.module.policy_version == steps
    assert run.fake.versions == list(range(steps + 1))


def test_every_draw_is_trained_once_in_its_step(make_run):
    trace = Trace()
    make_run(3, rollout=STREAMING, callbacks=[trace]).fit()
    for step in range(3):
        draws = [draw for s, _, chunk in trace.chunks if s == step for draw in chunk]
        assert sorted(draws) == list(range(4 * step, 4 * step + 4))
    assert [index for s, index, _ in trace.chunks if s == 0] == list(range(sum(s == 0 for s, _, _ in trace.chunks)))


@pytest.mark.parametrize("warmup", [0, 3])
def test_model_checkpoint_counts_ppo_steps_also_in_warmup(make_run, tmp_path, warmup):
    """Pitfall 111: `every_n_train_steps=2` writes at 2, 4, 6, also while the policy's optimizer never steps."""
    saver = ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}", auto_insert_metric_name=False
    )
    run = make_run(
        6, rollout=STREAMING, ppo_settings={"critic_warmup_steps": warmup}, callbacks=[saver], enable_checkpointing=True
    )
    run.fit()
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["2.ckpt", "4.ckpt", "6.ckpt"]


def test_one_scheduler_tick_per_ppo_step(make_run):
    """Pitfalls 100, 101: ticks do not depend on epochs or chunks, and reach the live optimizer after warm-up."""
    trace = Trace()
    schedule = partial(LinearWarmupDecay, warmup_steps=0, total_steps=10)
    run = make_run(
        4,
        rollout=STREAMING,
        ppo_settings={"critic_warmup_steps": 2, "critic_ppo_epochs": 3, "critic_minibatches": 2},
        module={"policy_scheduler": schedule, "critic_scheduler": schedule},
        callbacks=[trace],
    )
    run.fit()
    policy = [rate[0] / 6e-4 for rate in trace.rates]
    critic = [rate[1] / 1e-3 for rate in trace.rates]
    assert policy == pytest.approx([1.0, 1.0, 0.9, 0.8])
    assert critic == pytest.approx([0.9, 0.8, 0.7, 0.6])


def test_warmup_freezes_the_policy_and_trains_the_critic(make_run):
    run = make_run(2, ppo_settings={"critic_warmup_steps": 2})
    before = run.weights()
    run.fit()
    after = run.weights()
    assert all(before[name].equal(after[name]) for name in before if name.startswith("policy.model"))
    assert not before["critic.model.score.weight"].equal(after["critic.model.score.weight"])
    assert "policy/loss" not in run.trainer.callback_metrics
    assert "critic/loss" in run.trainer.callback_metrics
    assert run.fake.versions == [0, 1, 2]
