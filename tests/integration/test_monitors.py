"""A misspelt monitor is said once, when it can be known; one that is only late is not."""

import warnings

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ppo.console import fail_setting

VALIDATION = [{"prompt": "^ab="}]


def each_step(folder, monitor, **settings):
    return ModelCheckpoint(folder, monitor=monitor, every_n_train_steps=1, **settings)


def each_epoch(folder, monitor):
    return ModelCheckpoint(folder, monitor=monitor)


def lax(folder, monitor):
    return EarlyStopping(monitor, strict=False)


class Watch(Callback):
    """Notes after how many PPO steps each warning came."""

    def __init__(self, caught):
        self.caught, self.steps = caught, []

    def note(self, trainer, *_):
        self.steps += [trainer.global_step] * (len(self.caught) - len(self.steps))

    on_train_batch_start = on_validation_end = on_train_batch_end = note


def fit(make_run, callbacks, steps=4, **settings):
    """Run; returns the texts of the warnings, and after how many PPO steps each was seen."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "`isinstance", FutureWarning)
        watch = Watch(caught)
        run = make_run(steps, callbacks=[*callbacks, watch], enable_checkpointing=None, **settings)
        run.fit()
        watch.note(run.trainer)
    return [str(warning.message) for warning in caught], watch.steps


@pytest.mark.parametrize(
    ("make", "monitor", "settings", "step", "message"),
    [
        (each_step, "rollout/rewrd_mean", {}, 1, "did you mean rollout/reward_mean"),
        # Lightning would say it, too, with the names of all metrics
        (each_epoch, "rollout/rewrd_men", {}, 1, "did you mean rollout/reward_mean"),
        (lax, "rollout/rewrd_mean", {}, 1, "did you mean rollout/reward_mean"),
        (each_step, "val/rewrd_mean", {"validation_prompts": VALIDATION}, 1, "did you mean val/reward_mean"),
        (
            lax,
            "val/rewrd_mean",
            {"validation_prompts": VALIDATION, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 1},
            2,
            "did you mean val/reward_mean",
        ),
        (each_step, "val/reward_mean", {}, 1, "give validation_prompts, which its metrics need"),
        (
            each_step,
            "val/reward_mean",
            {"validation_prompts": VALIDATION, "limit_val_batches": 0},
            1,
            "give validation_prompts, which its metrics need",
        ),
        (lax, "xyz", {}, 1, "set one, for example advantage/mean"),
    ],
)
def test_a_monitor_that_no_metric_has_the_name_of(make_run, tmp_path, make, monitor, settings, step, message):
    callback = make(tmp_path / "saved", monitor)
    said, steps = fit(make_run, [callback], **settings)
    name = type(callback).__name__
    assert len(said) == 1, said
    assert said[0].startswith(f"trainer.callbacks={name} has monitor={monitor!r}, which is no metric so far; {message}")
    assert "\n" not in said[0]
    assert steps == [step]


def test_the_only_step_is_enough(make_run, tmp_path):
    said, _ = fit(make_run, [each_step(tmp_path / "saved", "critic/los")], steps=1)
    assert [text.split("; ")[1] for text in said] == ["did you mean critic/loss or critic/lr?"]


class Late(Callback):
    """Logs when an epoch ends."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("own/late", 1.0)


@pytest.mark.parametrize(
    ("monitor", "settings"),
    [
        ("rollout/reward_mean", {}),
        ("step", {}),
        ("epoch", {}),
        (None, {}),
        ("own/late", {}),
        ("own/late", {"validation_prompts": VALIDATION}),
        # saves come before the first validation
        ("val/reward_mean", {"validation_prompts": VALIDATION, "check_val_every_n_epoch": 3}),
        # which never comes
        ("val/reward_mean", {"validation_prompts": VALIDATION, "check_val_every_n_epoch": 9}),
    ],
)
def test_nothing_is_said_of_a_metric_that_comes(make_run, tmp_path, monitor, settings):
    said, _ = fit(make_run, [each_step(tmp_path / "saved", monitor), Late()], **settings)
    assert said == []


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("saves", [{}, {"every_n_train_steps": 1}])
def test_where_lightning_ends_the_run_nothing_is_added(make_run, tmp_path, every, saves):
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val/rewrd_mean", **saves)
    for callback, error in ((EarlyStopping("val/rewrd_mean"), RuntimeError), (saver, MisconfigurationException)):
        if callback is saver and saves and every == 1:
            # the one that goes on: see above
            continue
        with pytest.raises(error, match="val/rewrd_mean"):
            fit(make_run, [callback], validation_prompts=VALIDATION, check_val_every_n_epoch=every)


def test_the_command_line_shortens_lightnings_error(make_run, tmp_path, capsys):
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val/rewrd_mean")
    with pytest.raises(MisconfigurationException) as caught:
        fit(make_run, [saver], validation_prompts=VALIDATION)
    capsys.readouterr()
    assert fail_setting(caught.value) == 2
    says = "has monitor='val/rewrd_mean', which is no metric so far; did you mean val/reward_mean"
    assert capsys.readouterr().err.startswith(f"error: trainer.callbacks=ModelCheckpoint {says}")


def test_every_fit_says_it(make_run, tmp_path):
    run = make_run(1, callbacks=[each_step(tmp_path / "saved", "critic/los")], enable_checkpointing=None)
    for steps in (1, 2):
        run.trainer.fit_loop.max_epochs = steps
        with pytest.warns(UserWarning, match="did you mean critic/loss") as caught:
            run.fit()
        assert len(caught) == 1
