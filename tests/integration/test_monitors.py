"""A misspelt monitor is said once, when it can be known; one that is only late is not."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ppo.callbacks import StepCheckpoint
from lightning_ppo.console import fail_setting
from lightning_ppo.errors import ConfigError

VALIDATION = [{"prompt": "^ab="}]


def each_step(folder, monitor, kind=ModelCheckpoint, **settings):
    return kind(folder, monitor=monitor, every_n_train_steps=1, **settings)


def each_validated(folder, monitor):
    return each_step(folder, monitor, StepCheckpoint)


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
        (each_validated, "val/rewrd_mean", {"validation_prompts": VALIDATION}, 1, "did you mean val/reward_mean"),
        (
            lax,
            "val/rewrd_mean",
            {"validation_prompts": VALIDATION, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 1},
            2,
            "did you mean val/reward_mean",
        ),
        (each_validated, "val/reward_mean", {}, 1, "give validation_prompts, which its metrics need"),
        (
            each_validated,
            "val/reward_mean",
            {"validation_prompts": VALIDATION, "limit_val_batches": 0},
            1,
            "give validation_prompts, which its metrics need",
        ),
        (each_step, "policy/entrpy", {"ppo_settings": {"critic_warmup_steps": 2}}, 3, "did you mean policy/entropy"),
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
        # the policy is frozen until then, or until the end
        ("policy/entropy", {"ppo_settings": {"critic_warmup_steps": 2}}),
        ("policy/entropy", {"ppo_settings": {"critic_warmup_steps": 9}}),
        # which never comes
        ("val/reward_mean", {"validation_prompts": VALIDATION, "check_val_every_n_epoch": 9}),
    ],
)
def test_nothing_is_said_of_a_metric_that_comes(make_run, tmp_path, monitor, settings):
    said, _ = fit(make_run, [each_validated(tmp_path / "saved", monitor), Late()], **settings)
    assert said == []


@pytest.mark.parametrize("every", [1, 2])
def test_where_lightning_ends_the_run_nothing_is_added(make_run, tmp_path, every):
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val/rewrd_mean")
    for callback, error in ((EarlyStopping("val/rewrd_mean"), RuntimeError), (saver, MisconfigurationException)):
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


# ---------------------------------------------------------------- ranked by what belongs to it

SCORES = (0.1, 0.9, 0.3, 0.5, 0.7, 0.2)
"""Of the policy after each PPO step."""


class Score(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("own/score", SCORES[max(0, trainer.global_step - 1)])


def saved(folder):
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("every", "validates", "steps", "best", "files"),
    [
        (1, 1, 4, 2, {"last.ckpt": 4, "step=2.ckpt": 2}),
        (1, 2, 6, 2, {"last.ckpt": 6, "step=2.ckpt": 2}),
        (2, 1, 6, 2, {"last.ckpt": 6, "step=2.ckpt": 2}),
        # due after 2 and 4, validated after 3; the end is not validated
        (2, 3, 4, 3, {"last.ckpt": 4, "step=3.ckpt": 3}),
        # due after 3, validated after 5 with the first; the end has a number of its own
        (3, 5, 6, 5, {"last.ckpt": 6, "step=5.ckpt": 5}),
        # never due, but the end is validated
        (9, 2, 4, 4, {"last.ckpt": 4, "step=4.ckpt": 4}),
    ],
)
@pytest.mark.parametrize("save_last", ["link", True])
def test_a_step_is_ranked_by_its_own_validation(
    make_run, cut, tmp_path, every, validates, steps, best, files, save_last
):
    folder = tmp_path / "saved"
    settings = {"monitor": "own/score", "mode": "max", "save_top_k": 1, "save_last": save_last}
    saver = StepCheckpoint(folder, "{step}", every_n_train_steps=every, **settings)
    run = make_run(
        steps,
        rollout=cut(2, 2, steps=steps),
        callbacks=[Score(), saver],
        enable_checkpointing=True,
        validation_prompts=VALIDATION,
        check_val_every_n_epoch=validates,
        num_sanity_val_steps=1,
    )
    run.fit()
    assert saved(folder) == files
    assert saver.best_model_path.endswith(f"step={best}.ckpt")
    assert float(saver.best_model_score) == pytest.approx(SCORES[best - 1])
    assert (folder / "last.ckpt").is_symlink() == (save_last == "link" and files["last.ckpt"] == best)


@pytest.mark.parametrize("validates", [1, 2])
def test_a_metric_that_comes_after_warmup_ends_nothing(make_run, cut, tmp_path, validates):
    saver = StepCheckpoint(tmp_path / "saved", "{step}", monitor="policy/loss", every_n_train_steps=1, save_top_k=-1)
    settings = {"validation_prompts": VALIDATION, "check_val_every_n_epoch": validates}
    said, _ = fit(make_run, [saver], rollout=cut(2, 2), ppo_settings={"critic_warmup_steps": 2}, **settings)
    assert said == []
    assert saved(tmp_path / "saved") == {"step=3.ckpt": 3, "step=4.ckpt": 4}


def test_a_misspelt_metric_of_validation_ends_nothing(make_run, tmp_path):
    folder = tmp_path / "saved"
    saver = StepCheckpoint(folder, "{step}", monitor="val/rewrd_mean", every_n_train_steps=1, save_last=True)
    said, steps = fit(make_run, [saver], validation_prompts=VALIDATION, check_val_every_n_epoch=2)
    assert [text.split("; ")[1] for text in said] == ["did you mean val/reward_mean or rollout/reward_mean?"]
    assert steps == [2]
    assert saved(folder) == {"last.ckpt": 4}


def test_lightnings_own_would_rank_it_by_the_validation_before(make_run, tmp_path):
    run = make_run(1, callbacks=[each_step(tmp_path, "val/reward_mean")], enable_checkpointing=True)
    with pytest.raises(ConfigError) as caught:
        run.fit()
    assert str(caught.value) == (
        "trainer.callbacks=ModelCheckpoint with monitor=val/reward_mean and every_n_train_steps ranks a step by the "
        "validation before it; use lightning_ppo.StepCheckpoint, or every_n_epochs"
    )
