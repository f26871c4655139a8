"""Checkpoints are PPO step boundaries, and a resumed run is the uninterrupted one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError
from lightning_ppo.schedulers import LinearWarmupDecay

STREAMING = {"min_groups_for_streaming_train": 1}
SCHEDULE = partial(LinearWarmupDecay, warmup_steps=2, total_steps=6)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def flat(value, path=""):
    """Every leaf of nested containers."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: value}


class SaveAt(Callback):
    """Asks for a checkpoint in a given hook of a given PPO step."""

    def __init__(self, hook, step, path):
        self.path, self.step, self.done = str(path), step, False
        setattr(self, hook, self._save)

    def _save(self, trainer, *_, **__):
        if trainer.current_epoch == self.step and not self.done:
            self.done = True
            trainer.save_checkpoint(self.path)


def every_step(folder):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, filename="{step}")


HOOKS = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_chunk_ready",
    "on_chunk_end",
    "on_rollout_batch_complete",
    "on_policy_update_end",
    "on_refit_end",
    "on_critic_epoch_end",
    "on_ppo_step_end",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", [{"critic_minibatches": 2}, {"critic_warmup_steps": 1}])
def test_resume_is_bitwise_equal_from_a_save_in_any_hook(make_run, tmp_path, hook, settings):
    """Pitfalls 94, 95, 100, 103, 112, and the exclusion window: wherever the save was asked for."""
    arguments = {
        "ppo_settings": settings,
        "module": {"policy_scheduler": SCHEDULE, "critic_scheduler": SCHEDULE},
        "validation_prompts": [{"prompt": "^ab="}],
    }
    path = tmp_path / "asked.ckpt"
    whole = make_run(4, callbacks=[SaveAt(hook, 1, path)], **arguments)
    whole.fit()
    whole.trainer.save_checkpoint(tmp_path / "whole.ckpt")
    resumed = make_run(4, **arguments)
    resumed.fit(path)
    resumed.trainer.save_checkpoint(tmp_path / "resumed.ckpt")
    assert resumed.trainer.global_step == resumed.trainer.current_epoch == 4
    ends = [flat(torch.load(tmp_path / name, weights_only=True)) for name in ("whole.ckpt", "resumed.ckpt")]
    # what happens to be finished when the run ends, and when it was finished, depends on timing
    ignored = ("/loops/", "/callbacks/", "/lightning_ppo/prompts/rollouts/")
    first, second = [{k: v for k, v in end.items() if not k.startswith(ignored)} for end in ends]
    assert first.keys() == second.keys()
    for name, value in first.items():
        equal = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert equal, name


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_chunk_end", "on_policy_update_end"])
def test_a_save_inside_a_step_appears_at_its_end_only(make_run, tmp_path, hook):
    seen = []
    path = tmp_path / "asked.ckpt"

    class Watch(ppo.PPOCallback):
        def on_ppo_step_end(self, trainer, pl_module, payload):
            seen.append((payload.ppo_step, path.exists()))

        def on_train_epoch_end(self, trainer, pl_module):
            seen.append((trainer.global_step, path.exists()))

    # in the first chunk's `on_train_batch_start` nothing is accumulated yet: that save is the last boundary's
    expected = hook == "on_train_batch_start"
    make_run(2, rollout=STREAMING, callbacks=[SaveAt(hook, 1, path), Watch()]).fit()
    assert seen == [(1, False), (1, False), (2, expected), (2, True)]
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_ppo"]["ppo_step"] == saved["global_step"] == (1 if expected else 2)


def test_error_mode_refuses_a_save_inside_a_step(make_run, tmp_path):
    callbacks = [SaveAt("on_chunk_end", 1, tmp_path / "asked.ckpt"), ppo.CheckpointExclusion(mode="error")]
    run = make_run(2, callbacks=callbacks)
    with pytest.raises(CheckpointError, match="inside PPO step 1; save between steps"):
        run.fit()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_failed_step_drops_its_saves_and_keeps_the_last_checkpoint(make_run, tmp_path):
    """Pitfall 106: what is on disk after a failure is the last boundary, and it loads."""
    saver = every_step(tmp_path / "saved")

    class Fail(ppo.PPOCallback):
        def on_policy_update_end(self, trainer, pl_module, payload):
            if payload.ppo_step == 2:
                trainer.save_checkpoint(tmp_path / "torn.ckpt")
                raise RuntimeError("boom")

    run = make_run(4, callbacks=[Fail(), saver], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="boom"):
        run.fit()
    assert not (tmp_path / "torn.ckpt").exists()
    (path,) = (tmp_path / "saved").iterdir()
    resumed = make_run(4, callbacks=[every_step(tmp_path / "saved")], enable_checkpointing=True)
    resumed.fit(path)
    straight = make_run(4)
    straight.fit()
    assert same(resumed.weights(), straight.weights())


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_failing_write_leaves_the_previous_checkpoint(make_run, tmp_path, monkeypatch):
    """Pitfall 106: the old file goes only after the new one is complete."""
    saver = every_step(tmp_path / "saved")
    run = make_run(3, callbacks=[saver], enable_checkpointing=True)
    write = run.trainer.strategy.checkpoint_io.save_checkpoint
    calls = []

    def fail_second(checkpoint, path, storage_options=None):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")
        write(checkpoint, path, storage_options)

    monkeypatch.setattr(run.trainer.strategy.checkpoint_io, "save_checkpoint", fail_second)
    with pytest.raises(OSError, match="disk full"):
        run.fit()
    (path,) = (tmp_path / "saved").iterdir()
    resumed = make_run(3, callbacks=[every_step(tmp_path / "saved")], enable_checkpointing=True)
    resumed.fit(path)
    assert resumed.trainer.global_step == 3


def test_streaming_resume_is_bitwise_equal_when_chunks_are_replayed(make_run, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    first = make_run(
        4,
        rollout=STREAMING,
        callbacks=[SaveAt("on_train_epoch_end", 1, tmp_path / "a.ckpt")],
        logger=CSVLogger(tmp_path),
    )
    first.fit()
    recorded = Path(first.trainer.log_dir) / "schedule.jsonl"
    # the run's header, and a line per step
    assert len(recorded.read_text().splitlines()) == 5
    replay = {**STREAMING, "replay_chunks": str(recorded)}
    again = make_run(4, rollout=replay)
    again.fit()
    assert same(first.weights(), again.weights())
    resumed = make_run(4, rollout=replay)
    resumed.fit(tmp_path / "a.ckpt")
    assert same(first.weights(), resumed.weights())


def test_saved_cursor_is_the_first_untrained_prompt(make_run, tmp_path):
    run = make_run(3, callbacks=[SaveAt("on_train_epoch_end", 1, tmp_path / "a.ckpt")], rollout=STREAMING)
    run.fit()
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["lightning_ppo"]["prompts"]["stream"]["cursor"] == 8


def test_another_kind_of_optimizer_is_refused(make_run, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = make_run(2, module={"critic_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)})
    with pytest.raises(CheckpointError) as caught:
        other.fit(tmp_path / "one.ckpt")
    assert str(caught.value) == (
        "critic_optimizer=SGD cannot go on with the state of AdamW that the checkpoint holds; set AdamW, or export the "
        "checkpoint and start a new run from its folders"
    )
    assert other.fake.spec is None


def test_load_from_checkpoint(make_run, policy_folder, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = ppo.PPOModule.load_from_checkpoint(tmp_path / "one.ckpt", policy=policy_folder, weights_only=True)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, run.weights()[name]), name
    assert loaded.policy_version == 1


def test_policy_and_critic_of_different_steps_are_refused(make_run, tmp_path):
    run = make_run(3, callbacks=[SaveAt("on_train_epoch_end", 0, tmp_path / "a.ckpt")])
    run.fit()
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["state_dict"]["critic.completed_steps"] += 1
    torch.save(saved, tmp_path / "mixed.ckpt")
    resumed = make_run(3)
    with pytest.raises(CheckpointError, match="different PPO steps"):
        resumed.fit(tmp_path / "mixed.ckpt")
    assert resumed.fake.spec is None


def test_reference_policy_is_not_in_the_checkpoint(make_run, tmp_path):
    run = make_run(
        1,
        ppo_settings={"kl_placement": "loss", "kl_coef": 0.1},
        callbacks=[SaveAt("on_train_epoch_end", 0, tmp_path / "a.ckpt")],
    )
    run.fit()
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in saved["state_dict"]} == {"policy", "critic"}


def test_resume_of_a_finished_run_trains_nothing(make_run, tmp_path):
    """Pitfall 94 turned round: nothing left to do is not an error, and no rollout is started."""
    run = make_run(2, callbacks=[SaveAt("on_train_epoch_end", 1, tmp_path / "a.ckpt")])
    run.fit()
    resumed = make_run(2)
    resumed.fit(tmp_path / "a.ckpt")
    assert resumed.trainer.global_step == 2
    assert resumed.fake.requests == []
