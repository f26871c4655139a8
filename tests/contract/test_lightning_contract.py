"""What we rely on in Lightning beyond its documented behaviour, one test per item.

If one fails after an upgrade, the message says what in lightning_ppo leans on it, and where upstream discusses it.
"""

import os
import signal
import threading

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

UPSTREAM = "https://github.com/Lightning-AI/pytorch-lightning/issues/"


def contract(holds, breaks, issue=None):
    """Fail with what leans on the broken assumption."""
    if not holds:
        where = f"; see {UPSTREAM}{issue}" if issue is not None else ""
        pytest.fail(f"Lightning {L.__version__} changed: {breaks}{where}")


class Tiny(L.LightningModule):
    """Two optimizers under manual optimization; steps them through the strategy, as we do."""

    def __init__(self, events=None):
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self.events = events if events is not None else []
        self.closing = 2

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.policy, self.critic)]

    def training_step(self, batch, batch_idx):
        self.events.append(f"train{batch}")
        for optimizer in self.optimizers(use_pl_optimizer=False):
            self.trainer.strategy.optimizer_step(optimizer, lambda: None)
        if batch == self.closing:
            self.close_step()

    def close_step(self):
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def validation_step(self, batch, batch_idx):
        self.events.append("validate")


class Chunks:
    """Three batches, of unknown number."""

    def __init__(self, events, numbers=(0, 1, 2)):
        self.events, self.numbers = events, numbers

    def __iter__(self):
        self.events.append("iter")
        for number in self.numbers:
            self.events.append(f"yield{number}")
            yield number


class Data(L.LightningDataModule):
    def __init__(self, events, numbers=(0, 1, 2)):
        super().__init__()
        self.events, self.numbers = events, numbers

    def train_dataloader(self):
        return Chunks(self.events, self.numbers)

    def val_dataloader(self):
        return [0]


class Ours(SingleDeviceStrategy):
    """What our strategy does to the trainer, without the rest of it."""

    accumulate = 10**9
    limit = 10**6

    def __init__(self, events=()):
        super().__init__(device=torch.device("cpu"))
        self.events = events if isinstance(events, list) else []

    def setup(self, trainer):
        super().setup(trainer)
        trainer.accumulate_grad_batches = self.accumulate
        trainer.limit_train_batches = self.limit

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        self.events.append(("save", os.path.basename(filepath)))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath):
        self.events.append(("remove", os.path.basename(filepath)))
        super().remove_checkpoint(filepath)

    def on_exception(self, exception):
        self.events.append("strategy.on_exception")
        super().on_exception(exception)

    def teardown(self):
        self.events.append("strategy.teardown")
        super().teardown()


def trainer_for(tmp_path, events=(), epochs=2, **settings):
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    return L.Trainer(
        strategy=Ours(events),
        accelerator="cpu",
        max_epochs=epochs,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        **{**defaults, **settings},
    )


def test_global_step_is_the_progress_that_we_move(tmp_path):
    events = []
    trainer = trainer_for(tmp_path)
    trainer.fit(Tiny(events), datamodule=Data(events))
    contract(
        trainer.global_step == 2,
        "StreamingPPOStrategy.complete_step moves manual_optimization.optim_step_progress, and strategy.optimizer_step "
        f"must not: global_step is {trainer.global_step} after 2 PPO steps",
        17958,
    )


def test_accumulate_grad_batches_can_be_set_after_validation_of_the_settings(tmp_path):
    events = []
    trainer = trainer_for(tmp_path)
    trainer.fit(Tiny(events), datamodule=Data(events))
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
    contract(
        stepped == 2,
        "loggers and monitors take _batches_that_stepped as their x-axis; with a huge accumulate_grad_batches it must "
        f"move once per epoch, but it is {stepped} after 2",
        17958,
    )


def test_integer_limit_means_no_prefetch_and_iter_per_epoch(tmp_path):
    events = []
    module = Tiny(events)
    module.on_train_start = lambda: events.append("train_start")
    module.on_train_epoch_end = lambda: events.append("epoch_end")
    trainer_for(tmp_path).fit(module, datamodule=Data(events))
    epoch = ["yield0", "train0", "yield1", "train1", "yield2", "train2", "epoch_end"]
    contract(
        [event for event in events if event not in ("iter", "train_start")] == 2 * epoch,
        "a loader of unknown length under an integer limit_train_batches must be fetched one batch at a time, or a "
        f"chunk of the next PPO step is waited for before this one is trained: {events}",
    )
    contract(
        "train_start" in events and events.index("train_start") < events.index("yield0"),
        "rollouts start in PPOModule.on_train_start, so the first batch must not be fetched before: the run would hang",
    )
    contract(
        events.count("iter") == 2,
        f"RolloutDataModule starts a PPO step's chunks in __iter__, once per epoch: {events}",
    )


def test_validation_waits_for_the_batch_that_says_it_is_the_last(tmp_path):
    events = []
    module = Tiny(events)

    def on_train_start():
        module.trainer.val_check_batch = float("inf")

    module.on_train_start = on_train_start
    trainer_for(tmp_path, epochs=4, check_val_every_n_epoch=2, limit_val_batches=1).fit(module, datamodule=Data(events))
    order = [event for event in events if event in ("train0", "train2", "validate")]
    contract(
        order == 2 * ["train0", "train2", "train0", "train2", "validate"],
        "PPOModule sets val_check_batch to infinity and complete_step sets batch_progress.is_last_batch, so that "
        f"validation comes after the closing chunk only: {order}",
        17958,
    )


def test_the_closing_batch_ends_the_epoch(tmp_path):
    """Without another look at the loader, which would be the next step's business."""
    events = []
    trainer = trainer_for(tmp_path, epochs=1)
    trainer.fit(Tiny(events), datamodule=Data(events, numbers=(0, 1, 2, 3)))
    contract(
        "yield3" not in events and trainer.current_epoch == 1,
        f"batch_progress.is_last_batch = True must end the epoch after the closing chunk: {events}",
    )


def test_configure_callbacks_comes_before_setup_and_before_lightnings_own_checks(tmp_path):
    class Refuse(Tiny):
        def configure_callbacks(self):
            events.append(f"configure_callbacks {self.trainer.accumulate_grad_batches}")
            return []

        def setup(self, stage):
            events.append("setup")

    events = []
    with pytest.raises(MisconfigurationException):
        trainer_for(tmp_path, accumulate_grad_batches=4).fit(Refuse(events), datamodule=Data(events))
    contract(
        events[:1] == ["configure_callbacks 4"],
        "check_run runs in PPOModule.configure_callbacks; it must come before Lightning's own error about "
        f"accumulate_grad_batches, with the trainer attached: {events}",
    )
    events.clear()
    trainer_for(tmp_path, epochs=1).fit(Refuse(events), datamodule=Data(events))
    contract(events[1:2] == ["setup"], f"check_run must come before anything is set up: {events}")


def test_configured_callbacks_are_added_to_those_of_the_trainer(tmp_path):
    class Mine(Callback):
        pass

    class Adds(Tiny):
        def configure_callbacks(self):
            return [Mine()]

    other = Callback()
    trainer = trainer_for(tmp_path, epochs=1, callbacks=[other])
    trainer.fit(Adds(), datamodule=Data([]))
    contract(
        other in trainer.callbacks and sum(isinstance(c, Mine) for c in trainer.callbacks) == 1,
        "PPOModule.configure_callbacks adds the phase callbacks that the user did not pass",
    )


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_all_saves_and_removals_pass_the_strategy(tmp_path):
    events = []
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=1, filename="{epoch}")
    trainer = trainer_for(tmp_path, events, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Tiny(), datamodule=Data([]))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    passed = [event for event in events if isinstance(event, tuple)]
    contract(
        passed
        == [("save", "epoch=0.ckpt"), ("save", "epoch=1.ckpt"), ("remove", "epoch=0.ckpt"), ("save", "own.ckpt")],
        "the checkpoint window is in Strategy.save_checkpoint and remove_checkpoint; a save on another way would "
        f"tear a PPO step: {passed}",
    )


def test_callbacks_come_before_the_module_at_the_end_of_a_batch(tmp_path):
    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_):
            events.append("callback")

    events = []
    module = Tiny()
    module.on_train_batch_end = lambda *_: events.append("module")
    trainer_for(tmp_path, epochs=1, callbacks=[Watch()]).fit(module, datamodule=Data([]))
    contract(
        events == 3 * ["callback", "module"],
        "PPOModule.on_train_batch_end writes the saves that ModelCheckpoint asked for in its own on_train_batch_end",
    )


def test_loop_state_has_the_keys_that_a_boundary_rewrites(tmp_path):
    trainer = trainer_for(tmp_path, epochs=1)
    trainer.fit(Tiny(), datamodule=Data([]))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loop = torch.load(tmp_path / "a.ckpt", weights_only=True)["loops"]["fit_loop"]
    counts = {"ready", "started", "processed", "completed"}
    fits = (
        all(set(loop["epoch_progress"][scope]) == counts for scope in ("total", "current"))
        and all(set(loop["epoch_loop.batch_progress"][scope]) == counts for scope in ("total", "current"))
        and "is_last_batch" in loop["epoch_loop.batch_progress"]
        and "_batches_that_stepped" in loop["epoch_loop.state_dict"]
    )
    contract(fits, f"checkpoint.at_boundary rewrites the saved loop counters, whose keys are now {loop}", 19815)


def test_state_of_the_data_module_is_loaded_after_setup_and_before_training(tmp_path):
    class Keeps(Data):
        def state_dict(self):
            return {"cursor": 8}

        def load_state_dict(self, state):
            events.append(f"load {state['cursor']}")

    events = []
    module = Tiny(events)
    module.setup = lambda stage: events.append("setup")
    module.on_fit_start = lambda: events.append("fit_start")
    first = trainer_for(tmp_path, epochs=1)
    first.fit(module, datamodule=Keeps(events))
    first.save_checkpoint(tmp_path / "a.ckpt")
    events.clear()
    second = trainer_for(tmp_path, epochs=2)
    second.fit(module, datamodule=Keeps(events), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    contract(
        events[:3] == ["setup", "load 8", "fit_start"],
        f"the prompt cursor is restored into the collector that setup makes, before on_fit_start: {events[:4]}",
    )


def test_an_exception_reaches_the_strategy_and_tears_it_down(tmp_path):
    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("boom")

        def on_exception(self, exception):
            interrupted.append(self.trainer.interrupted)

    class Watch(Callback):
        def on_exception(self, trainer, *_):
            interrupted.append(trainer.interrupted)

    events, interrupted = [], []
    with pytest.raises(RuntimeError, match="boom"):
        trainer_for(tmp_path, events, callbacks=[Watch()]).fit(Fails(), datamodule=Data([]))
    contract(
        events == ["strategy.on_exception", "strategy.teardown"],
        f"engines are closed in Strategy.on_exception and teardown, the only hooks that run after a failure: {events}",
    )
    contract(
        interrupted == [True],
        "a save inside a PPO step must not raise while an exception is handled, which trainer.interrupted tells",
    )


def test_failure_in_setup_also_reaches_the_strategy(tmp_path):
    class Fails(Tiny):
        def setup(self, stage):
            raise RuntimeError("boom")

    events = []
    with pytest.raises(RuntimeError, match="boom"):
        trainer_for(tmp_path, events).fit(Fails(), datamodule=Data([]))
    contract(
        events == ["strategy.on_exception", "strategy.teardown"],
        f"what PPOModule.setup started must be closed if the rest of set-up fails: {events}",
    )


def test_sigterm_sets_a_flag_that_a_waiting_loader_can_see(tmp_path):
    class Waits(Data):
        def train_dataloader(self):
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))

            def wait():
                timer.start()
                for _ in range(500):
                    if self.trainer.received_sigterm:
                        seen.append(True)
                        return
                    threading.Event().wait(0.01)
                yield

            return type("Loader", (), {"__iter__": lambda _: wait()})()

    seen = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SIGTERMException):
            trainer_for(tmp_path, epochs=1).fit(Tiny(), datamodule=Waits([]))
    finally:
        signal.signal(signal.SIGTERM, before)
    contract(
        seen == [True],
        "RolloutDataModule polls trainer.received_sigterm while it waits for a chunk; Lightning looks between batches",
        21623,
    )


def test_gradients_are_cleared_around_validation_by_a_hook_that_can_be_overridden(tmp_path):
    called = []
    module = Tiny()
    module.on_validation_model_zero_grad = lambda: called.append(True)
    trainer = trainer_for(tmp_path, epochs=1, limit_val_batches=1)
    trainer.strategy.accumulate = 1
    module.on_train_start = lambda: setattr(trainer, "val_check_batch", float("inf"))
    trainer.fit(module, datamodule=Data([]))
    contract(
        called,
        "in manual mode Lightning clears gradients before validation; PPOModule switches that off by overriding "
        "on_validation_model_zero_grad, which is not called any more",
    )


def test_strategy_hooks_that_ours_overrides_still_exist():
    names = {
        DDPStrategy: ("configure_ddp", "setup_distributed", "model_to_device", "set_world_ranks", "setup_optimizers"),
        Strategy: (
            "setup",
            "teardown",
            "on_exception",
            "save_checkpoint",
            "remove_checkpoint",
            "process_dataloader",
            "optimizer_step",
            "setup_precision_plugin",
        ),
    }
    missing = [
        f"{kind.__name__}.{name}"
        for kind, attributes in names.items()
        for name in attributes
        if not hasattr(kind, name)
    ]
    contract(not missing, f"StreamingPPOStrategy overrides or calls {missing}, which are gone")


def test_private_parts_of_the_saver_and_the_command_line_still_exist():
    """What they do is tested where ours are, in tests/integration/test_monitors.py and tests/cli."""
    saver = ModelCheckpoint(every_n_train_steps=2)
    names = {
        saver: (
            "_defer_save_until_validation",
            "_every_n_train_steps",
            "_last_global_step_saved",
            "_monitor_candidates",
            "_save_last_checkpoint",
            "_save_topk_checkpoint",
            "_should_skip_saving_checkpoint",
        ),
        LightningCLI: (
            "_add_subcommands",
            "_instantiate_trainer",
            "_parse_ckpt_path",
            "_parser",
            "_prepare_subcommand_parser",
            "_run_subcommand",
            "_set_seed",
        ),
    }
    missing = [name for thing, attributes in names.items() for name in attributes if not hasattr(thing, name)]
    contract(not missing, f"StepCheckpoint or PPOCLI overrides or calls {missing}, which are gone")
    contract(saver._every_n_train_steps == 2, "StepCheckpoint reads how often it saves from `_every_n_train_steps`")


def test_one_process_needs_no_process_group(tmp_path):
    import lightning_ppo  # noqa: F401

    contract("streaming_ppo" in StrategyRegistry, "strategy='streaming_ppo' is looked up in StrategyRegistry")
    contract(
        not torch.distributed.is_initialized(),
        "StreamingPPOStrategy.setup_distributed makes no process group for one process",
    )


def test_models_are_not_wrapped(make_run):
    run = make_run(1)
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((trainer.strategy.model is pl_module, torch.distributed.is_initialized()))

    run.trainer.callbacks.append(Watch())
    run.fit()
    contract(
        seen == [(True, False)],
        "configure_ddp is overridden to leave the model unwrapped: DDP refuses a loss that does not touch the critic",
    )


def test_optimizer_step_of_the_strategy_calls_the_hook(tmp_path):
    steps = []
    module = Tiny()
    module.on_before_optimizer_step = lambda optimizer: steps.append(optimizer)
    trainer_for(tmp_path, epochs=1).fit(module, datamodule=Data([]))
    contract(
        len(steps) == 6,
        "strategy.optimizer_step must run the precision plugin and on_before_optimizer_step for both models",
        17958,
    )


def test_a_second_fit_sees_the_restored_limits(tmp_path):
    trainer = trainer_for(tmp_path, epochs=1)
    trainer.fit(Tiny(), datamodule=Data([]))
    with pytest.raises(MisconfigurationException):
        trainer.fit(Tiny(), datamodule=Data([]))
    trainer.accumulate_grad_batches, trainer.limit_train_batches = 1, 1.0
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Tiny(), datamodule=Data([]))
    contract(
        trainer.current_epoch == 2,
        "StreamingPPOStrategy.teardown restores accumulate_grad_batches and limit_train_batches for another fit",
    )


def test_metric_dictionaries_of_the_trainer_are_live(make_run):
    """`reporting.report` writes into them; if they are copies, ModelCheckpoint and EarlyStopping see none of ours."""
    run = make_run(1)
    run.fit()
    for name in ("callback_metrics", "logged_metrics"):
        getattr(run.trainer, name)["probe"] = 1.0
        assert "probe" in getattr(run.trainer, name), f"Trainer.{name} is a copy now; log with self.log_dict again"
    assert float(run.trainer.callback_metrics["rollout/reward_mean"]) > 0


def test_mixed_precision_keeps_no_copies_of_weights():
    """All passes of a PPO step are in one `training_step`, under one autocast: later ones must see the updates."""
    layer = torch.nn.Linear(4, 4)
    with MixedPrecision("bf16-mixed", "cpu").forward_context():
        before = layer(torch.ones(1, 4)).sum()
        before.backward()
        with torch.no_grad():
            layer.weight.add_(1.0)
        change = (layer(torch.ones(1, 4)).sum() - before).item()
    contract(
        change == pytest.approx(16.0, rel=0.05),
        "autocast caches weights in bfloat16; clear the cache after each optimizer step of `updates`",
    )
