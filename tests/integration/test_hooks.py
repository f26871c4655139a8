"""Hooks of a PPO step: when they come, what they bring, and callbacks that take a phase over."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.errors import ConfigError

HOOKS = (
    "on_chunk_ready",
    "on_chunk_end",
    "on_rollout_batch_complete",
    "on_before_policy_step",
    "on_policy_update_end",
    "on_before_refit",
    "on_refit_end",
    "on_critic_epoch_end",
    "on_ppo_step_end",
)
LIGHTNING_HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)


class Record(ppo.PPOCallback):
    """Remembers every hook with its payload."""

    def __init__(self):
        self.calls = []
        for name in (*HOOKS, *LIGHTNING_HOOKS):
            setattr(self, name, self._recorder(name))

    def _recorder(self, name):
        def hook(trainer, pl_module, *arguments, **_):
            self.calls.append((name, arguments[0] if arguments else None))

        return hook

    @property
    def names(self):
        return [name.removeprefix("on_") for name, _ in self.calls]

    def payloads(self, name):
        return [payload for called, payload in self.calls if called == name]


CHUNK = ["train_batch_start", "chunk_ready", "chunk_end"]
POLICY = ["before_policy_step", "before_optimizer_step", "policy_update_end"]
REFIT = ["before_refit", "refit_end"]
CRITIC = ["before_optimizer_step", "critic_epoch_end"]
END = ["ppo_step_end", "train_batch_end", "train_epoch_end"]


def step(chunks=1, *, policy=POLICY, critic=CRITIC):
    open_chunks = (chunks - 1) * [*CHUNK, "train_batch_end"]
    return ["train_epoch_start", *open_chunks, *CHUNK, "rollout_batch_complete", *policy, *REFIT, *critic, *END]


def test_order_of_hooks_in_full_batch_mode(make_run):
    record = Record()
    make_run(2, callbacks=[record]).fit()
    assert record.names == 2 * step()


def test_order_of_hooks_in_a_streaming_step(make_run, cut):
    record = Record()
    make_run(2, rollout=cut(2, 1, 1), callbacks=[record]).fit()
    assert record.names == 2 * step(chunks=3)


def test_order_of_hooks_in_warmup(make_run, cut):
    """No policy hook in warm-up; the refit's hooks come all the same, because the version moves."""
    record = Record()
    make_run(2, rollout=cut(3, 1), ppo_settings={"critic_warmup_steps": 1}, callbacks=[record]).fit()
    assert record.names == step(chunks=2, policy=[]) + step(chunks=2)
    assert [payload.weights_changed for payload in record.payloads("on_before_refit")] == [False, True]


def test_order_of_hooks_with_several_epochs(make_run):
    settings = {"ppo_epochs": 2, "policy_minibatches": 2, "critic_ppo_epochs": 2, "critic_minibatches": 3}
    record = Record()
    make_run(1, ppo_settings=settings, callbacks=[record]).fit()
    policy = 4 * ["before_policy_step", "before_optimizer_step"] + ["policy_update_end"]
    critic = 2 * [*3 * ["before_optimizer_step"], "critic_epoch_end"]
    assert record.names == step(policy=policy, critic=critic)


def test_payloads(make_run, cut):
    record = Record()
    settings = {"critic_ppo_epochs": 2, "critic_minibatches": 2}
    run = make_run(2, rollout=cut(3, 1), ppo_settings=settings, callbacks=[record])
    run.fit()
    ready = [payload.chunk for payload in record.payloads("on_chunk_ready")]
    assert [(c.ppo_step, c.index, c.draws, c.groups_dispatched, c.groups_per_step, c.is_closing) for c in ready] == [
        (0, 0, (0, 1, 2), 3, 4, False),
        (0, 1, (3,), 4, 4, True),
        (1, 0, (4, 5, 6), 3, 4, False),
        (1, 1, (7,), 4, 4, True),
    ]
    ends = record.payloads("on_chunk_end")
    assert [end.chunk for end in ends] == ready
    for end in ends:
        assert [row.trajectory for row in end.rows] == list(end.chunk.rows)
        for row in end.rows:
            shape = row.trajectory.response_ids.shape
            assert row.mask.shape == row.values.shape == row.advantages.shape == row.returns.shape == shape
    batches = [payload.batch for payload in record.payloads("on_rollout_batch_complete")]
    for number, batch in enumerate(batches):
        assert (batch.ppo_step, batch.num_chunks, batch.num_sequences) == (number, 2, 8)
        assert batch.rows == tuple(row for end in ends[2 * number : 2 * number + 2] for row in end.rows)
        assert batch.num_tokens == sum(len(row.trajectory.response_ids) for row in batch.rows)
    policy = record.payloads("on_policy_update_end")
    assert [(end.ppo_step, len(end.stats), end.stats[0].num_tokens) for end in policy] == [
        (number, 1, batch.num_tokens) for number, batch in enumerate(batches)
    ]
    assert all(
        payload.optimizer is run.module.optimizer("policy") for payload in record.payloads("on_before_policy_step")
    )
    assert [(p.policy_version, p.weights_changed) for p in record.payloads("on_before_refit")] == [(1, True), (2, True)]
    assert [p.policy_version for p in record.payloads("on_refit_end")] == [1, 2]
    assert all(payload.seconds >= 0 for payload in record.payloads("on_refit_end"))
    epochs = record.payloads("on_critic_epoch_end")
    assert [(end.epoch, len(end.stats)) for end in epochs] == [(0, 2), (1, 2)] * 2
    done = record.payloads("on_ppo_step_end")
    assert [end.ppo_step for end in done] == [1, 2]
    assert [end.batch for end in done] == batches
    assert done[0].metrics["step/chunks"] == 2
    assert done[1].metrics["rollout/reward_mean"] == pytest.approx(
        sum(row.trajectory.reward for row in batches[1].rows) / 8
    )


def test_the_gradient_before_the_policy_step_is_final(make_run):
    """What the hook sees is already divided, summed over ranks and clipped."""
    norms = []

    class Look(ppo.PPOCallback):
        def on_before_policy_step(self, trainer, pl_module, payload):
            grads = [p.grad.flatten() for group in payload.optimizer.param_groups for p in group["params"]]
            norms.append(float(torch.cat(grads).norm()))

    make_run(2, ppo_settings={"max_grad_norm": 1e-3}, callbacks=[Look()]).fit()
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-4)


def test_logging_inside_every_hook(make_run, cut):
    class Log(ppo.PPOCallback):
        pass

    def logger(name):
        def hook(self, trainer, pl_module, payload):
            self.log(f"callback/{name}", 1.0, on_step=False, on_epoch=True, batch_size=1)
            pl_module.log(f"module/{name}", 2.0, on_step=False, on_epoch=True, batch_size=1)

        return hook

    for name in HOOKS:
        setattr(Log, name, logger(name))
    run = make_run(1, rollout=cut(2, 2), callbacks=[Log()])
    run.fit()
    for name in HOOKS:
        assert run.trainer.callback_metrics[f"callback/{name}"] == 1.0
        assert run.trainer.callback_metrics[f"module/{name}"] == 2.0


def test_plain_callback_with_a_hook_method(make_run):
    class Plain(Callback):
        steps = ()

        def on_ppo_step_end(self, trainer, pl_module, payload):
            self.steps = (*self.steps, payload.ppo_step)

    plain = Plain()
    make_run(2, callbacks=[plain, Callback()]).fit()
    assert plain.steps == (1, 2)


def test_module_hook_is_called_after_the_callbacks(make_run):
    calls = []

    class Before(ppo.PPOCallback):
        def on_refit_end(self, trainer, pl_module, payload):
            calls.append("callback")

    run = make_run(1, callbacks=[Before()])
    run.module.on_refit_end = lambda payload: calls.append(payload.policy_version)
    run.fit()
    assert calls == ["callback", 1]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("on_chunk_redy", "did you mean on_chunk_ready?"),
        ("on_train_batch_ends", "did you mean on_train_batch_end?"),
        ("on_xyzzy", "see PPOCallback for the hooks"),
    ],
)
def test_misspelt_hook_is_an_error_with_the_nearest_name(make_run, wrong, hint):
    kind = type("Mine", (ppo.PPOCallback,), {wrong: lambda self, *_: None})
    run = make_run(1, callbacks=[kind()])
    with pytest.raises(ConfigError) as caught:
        run.fit()
    assert str(caught.value) == f"callbacks=Mine.{wrong} is not a hook; {hint}"
    assert run.fake.spec is None


def test_plain_callbacks_may_have_methods_of_any_name(make_run):
    """Only who inherits from PPOCallback asks for the check: other libraries have hooks of their own."""
    kind = type("Theirs", (Callback,), {"on_save_of_theirs": lambda self, *_: None})
    make_run(1, callbacks=[kind()]).fit()


# ---------------------------------------------------------------- callbacks in charge of a phase


def of_kind(run, kind):
    return [callback for callback in run.trainer.callbacks if isinstance(callback, kind)]


@pytest.mark.parametrize("kind", [ppo.CriticEpochs, ppo.CriticWarmup, ppo.WeightRefit, ppo.CheckpointExclusion])
def test_default_is_attached_once_and_a_subclass_replaces_it(make_run, kind):
    run = make_run(1)
    run.fit()
    assert [type(callback) for callback in of_kind(run, kind)] == [kind]
    mine = type("Mine", (kind,), {})()
    run = make_run(1, callbacks=[mine])
    run.fit()
    assert of_kind(run, kind) == [mine]


@pytest.mark.parametrize("kind", [ppo.CriticEpochs, ppo.CriticWarmup, ppo.WeightRefit, ppo.CheckpointExclusion])
def test_two_of_a_kind_are_refused(make_run, kind):
    mine = type("Mine", (kind,), {"state_key": "mine"})
    run = make_run(1, callbacks=[kind(), mine()])
    with pytest.raises(ConfigError, match=rf"^trainer.callbacks={kind.__name__} is there 2 times; pass at most one$"):
        run.fit()
    assert run.fake.spec is None


@pytest.mark.parametrize("kind", [ppo.CriticEpochs, ppo.WeightRefit])
def test_a_module_that_leaves_a_phase_to_nobody_is_refused(make_run, kind):
    run = make_run(1)
    attach = run.module.configure_callbacks
    run.module.configure_callbacks = lambda: [one for one in attach() if not isinstance(one, kind)]
    with pytest.raises(ConfigError, match=rf"^configure_callbacks=your own leaves .* without {kind.__name__}; add to "):
        run.fit()
    assert run.fake.spec is None


def test_a_module_with_optimizers_of_its_own_is_refused(make_run):
    run = make_run(1)
    run.module.configure_optimizers = lambda: torch.optim.SGD(run.module.policy.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^configure_optimizers=your own .*; pass policy_optimizer to PPOModule"):
        run.fit()
    assert run.fake.spec is None


def test_a_refit_that_publishes_nothing_is_noticed_at_once(make_run):
    """The next step's rollouts would wait for the version until `timeout_s`."""

    class EverySecond(ppo.WeightRefit):
        def refit(self, trainer, pl_module, policy_version, *, weights_changed):
            if policy_version % 2:
                super().refit(trainer, pl_module, policy_version, weights_changed=weights_changed)

    run = make_run(4, callbacks=[EverySecond()], rollout={"timeout_s": 60.0})
    with pytest.raises(ConfigError) as caught:
        run.fit()
    assert str(caught.value) == (
        "trainer.callbacks=EverySecond.refit returned without publishing policy version 2; call super().refit, with "
        "weights_changed=False to send the number only"
    )
    assert run.fake.versions == [0, 1]


def test_a_refit_may_send_the_number_only(make_run):
    class EverySecond(ppo.WeightRefit):
        def refit(self, trainer, pl_module, policy_version, *, weights_changed):
            super().refit(trainer, pl_module, policy_version, weights_changed=policy_version % 2 == 1)

    run = make_run(4, callbacks=[EverySecond()])
    run.fit()
    assert run.fake.versions == [0, 1, 2, 3, 4]


def test_own_numbers_count_once_per_call(make_run, tmp_path):
    """Lightning would guess a batch size from the first tensor of a chunk, warn about it, and weigh means by it."""

    class Own(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            pl_module.log("own/chunk", float(payload.chunk.index), on_step=False, on_epoch=True)

        def on_ppo_step_end(self, trainer, pl_module, payload):
            pl_module.log("own/step", float(payload.ppo_step), on_step=False, on_epoch=True)

    logger = CSVLogger(tmp_path)
    run = make_run(3, callbacks=[Own()], logger=logger, rollout={"min_groups_for_streaming_train": 1})
    run.fit()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [float(row["own/step"]) for row in rows if row.get("own/step")] == [1, 2, 3]
    chunks = [float(row["step/chunks"]) for row in rows if row.get("step/chunks")]
    assert [float(row["own/chunk"]) for row in rows if row.get("own/chunk")] == [(n - 1) / 2 for n in chunks]


def test_own_critic_epochs_decide_how_the_critic_trains(make_run):
    class Never(ppo.CriticEpochs):
        def train(self, trainer, pl_module, batch):
            return ()

    run = make_run(2, callbacks=[Never()])
    before = run.weights()
    run.fit()
    after = run.weights()
    critic = [name for name in before if name.startswith("critic.model")]
    assert critic
    assert all(before[name].equal(after[name]) for name in critic)
    assert "critic/loss" not in run.trainer.callback_metrics
    assert run.trainer.global_step == 2


def test_own_minibatches_are_used(make_run):
    class OneRowAtATime(ppo.CriticEpochs):
        def minibatches(self, pl_module, batch, epoch):
            yield from ([row] for row in batch.rows)

    record = Record()
    make_run(1, callbacks=[OneRowAtATime(), record]).fit()
    (end,) = record.payloads("on_critic_epoch_end")
    assert len(end.stats) == 8


def test_own_warmup_decides_which_steps_train_the_policy(make_run):
    class EveryOther(ppo.CriticWarmup):
        def policy_is_trainable(self, trainer, pl_module, ppo_step):
            return ppo_step % 2 == 1

    record = Record()
    make_run(4, callbacks=[EveryOther(), record]).fit()
    assert [payload.ppo_step for payload in record.payloads("on_policy_update_end")] == [1, 3]
    assert [p.weights_changed for p in record.payloads("on_before_refit")] == [False, True, False, True]


def test_own_refit_decides_what_the_engine_serves(make_run):
    class Zeros(ppo.WeightRefit):
        def refit(self, trainer, pl_module, policy_version, *, weights_changed):
            weights = ((name, torch.zeros_like(tensor)) for name, tensor in pl_module.export_policy())
            pl_module.rollouts.refit(weights, policy_version)

    run = make_run(1, callbacks=[Zeros()])
    run.fit()
    assert run.fake.versions == [0, 1]
    assert run.fake.weights
    assert all(not tensor.any() for tensor in run.fake.weights.values())


@pytest.mark.parametrize("through", ["attribute", "argument"])
def test_own_exclusion_decides_what_a_busy_save_does(make_run, tmp_path, through):
    class Strict(ppo.CheckpointExclusion):
        if through == "attribute":
            mode = "error"
        else:

            def __init__(self):
                super().__init__(mode="error")

    class Save(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            trainer.save_checkpoint(tmp_path / "busy.ckpt")

    run = make_run(1, callbacks=[Strict(), Save()])
    with pytest.raises(Exception, match="save between steps"):
        run.fit()
    assert not (tmp_path / "busy.ckpt").exists()


def test_state_of_a_callback_survives_a_checkpoint(make_run, tmp_path):
    class Count(ppo.PPOCallback):
        steps = 0

        def on_ppo_step_end(self, trainer, pl_module, payload):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state_dict):
            self.steps = state_dict["steps"]

    run = make_run(2, callbacks=[Count()])
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    count = Count()
    resumed = make_run(3, callbacks=[count])
    resumed.fit(tmp_path / "two.ckpt")
    assert count.steps == 3


def test_state_of_an_own_phase_callback_survives_a_checkpoint(make_run, tmp_path):
    class Decaying(ppo.CriticEpochs):
        trained = 0

        def train(self, trainer, pl_module, batch):
            self.trained += 1
            return super().train(trainer, pl_module, batch)

        def state_dict(self):
            return {"trained": self.trained}

        def load_state_dict(self, state_dict):
            self.trained = state_dict["trained"]

    run = make_run(1, callbacks=[Decaying()])
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    mine = Decaying()
    make_run(3, callbacks=[mine]).fit(tmp_path / "one.ckpt")
    assert mine.trained == 3
