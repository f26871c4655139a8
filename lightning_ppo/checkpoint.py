"""What a checkpoint says beyond Lightning's own parts: always a PPO step boundary, never something in between."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_ppo.errors import CheckpointError

KEY = "lightning_ppo"
"""Our entry in a checkpoint."""


def at_boundary(fit_loop: dict[str, Any], steps: int) -> None:
    """Rewrite the saved loop state as if it had been saved in `on_train_epoch_end` of the last completed step.

    Lightning derives from these counters where to resume. They differ with the hook a save comes from, and assume that
    the number of batches per epoch is known; a save in the last batch of an epoch of unknown length would resume inside
    that epoch.

    Args:
        fit_loop: `checkpoint["loops"]["fit_loop"]`; changed in place.
        steps: Completed PPO steps, at least 1.
    """
    for scope in ("total", "current"):
        fit_loop["epoch_progress"][scope].update(ready=steps, started=steps, processed=steps, completed=steps - 1)
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["current"].update(dict.fromkeys(batches["current"], batches["current"]["ready"]))
    batches["total"].update(dict.fromkeys(batches["total"], batches["total"]["ready"]))
    batches["is_last_batch"] = True
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps


def mark_saved(trainer: L.Trainer) -> None:
    """Tell every `ModelCheckpoint` that the step which a run begins with is on disk: it was resumed from there.

    Lightning's own would save that step once more after the first batch, which here is a chunk inside the next step:
    the deferred save would overwrite the checkpoint that the run resumed from with that of a later step.

    Args:
        trainer: A trainer that begins to train.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._last_global_step_saved == 0:
            callback._last_global_step_saved = trainer.global_step


def architectures(
    policy: PreTrainedModel, critic: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return what `export` needs to rebuild the models: their configs as JSON, and the tokenizer's folder."""
    parts = {
        "policy_config": policy.config.to_json_string(use_diff=False),
        "critic_config": critic.config.to_json_string(use_diff=False),
        "tokenizer": str(Path(tokenizer.name_or_path).resolve()),
    }
    if policy.generation_config is not None:
        parts["generation_config"] = policy.generation_config.to_json_string(use_diff=False)
    return parts


def not_a_file(path: str | Path) -> CheckpointError:
    """Say why a path is no checkpoint: nothing is there, or a folder, whose newest checkpoint is named."""
    folder = Path(path)
    if not folder.is_dir():
        return CheckpointError(f"ckpt_path={path} does not exist; give the path of a checkpoint")
    found = [file for part in ("*.ckpt", "checkpoints/*.ckpt") for file in folder.glob(part) if file.is_file()]
    newest = max(found, key=lambda file: (file.stat().st_mtime, file.name == "last.ckpt"), default=None)
    instead = "give the path of a checkpoint" if newest is None else f"give a file of it, such as {newest}"
    return CheckpointError(f"ckpt_path={path} is a folder; {instead}")


def check_is_ours(content: Any, path: object = None, why: str = "something else is in it") -> None:
    """Check that a file holds what a run of this package writes.

    Args:
        content: What was loaded from it.
        path: The file, where it is known.
        why: What to say if it does not.

    Raises:
        CheckpointError: it does not.
    """
    if not isinstance(content, dict) or not {KEY, "state_dict", "global_step"} <= content.keys():
        name = "ckpt_path" if path is None else f"ckpt_path={path}"
        raise CheckpointError(f"{name} is no checkpoint of lightning_ppo ({why}); give one that a run wrote")


def check_can_go_on(checkpoint: Mapping[str, Any]) -> None:
    """Refuse to train on from a checkpoint of the models alone.

    Raises:
        CheckpointError: it has no states of optimizers.
    """
    if "optimizer_states" not in checkpoint:
        why = "holds models only (save_weights_only=True)"
        raise CheckpointError(f"ckpt_path {why}; resume from a whole one, or export it and set policy and critic")


def check_same_models(saved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint's tensors are those of a module.

    Raises:
        CheckpointError: one is missing, or has another shape.
    """
    for name in sorted(saved.keys() ^ here.keys()):
        where = "only there" if name in saved else "only here"
        raise CheckpointError(f"ckpt_path holds other models ({name} is {where}); set model.policy to that of its run")
    for name, tensor in here.items():
        if tensor.shape != saved[name].shape:
            sizes = f"{name} is {list(saved[name].shape)} there and {list(tensor.shape)} here"
            raise CheckpointError(f"ckpt_path holds other models ({sizes}); set model.policy to that of its run")


def check_fits_together(state_dict: dict[str, Tensor], global_step: int) -> None:
    """Refuse a policy and a critic of different PPO steps.

    Args:
        state_dict: The module's state in the checkpoint.
        global_step: The checkpoint's own count of PPO steps.

    Raises:
        CheckpointError: the counts differ, or one is missing.
    """
    steps: dict[str, int | None] = {"checkpoint": global_step}
    for name in ("policy", "critic"):
        value = state_dict.get(f"{name}.completed_steps")
        steps[name] = None if value is None else int(value)
    if len(set(steps.values())) > 1:
        found = ", ".join(f"{name} {step}" for name, step in steps.items())
        raise CheckpointError(
            f"ckpt_path holds parts of different PPO steps ({found}); resume from an intact checkpoint"
        )
