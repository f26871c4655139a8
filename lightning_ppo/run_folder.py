"""The folder of a run of the command line: made before anything starts, removed if nothing did, named at the end."""

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ppo.errors import CheckpointError
from lightning_ppo.validation import reject

_FILES = ("metrics.csv", "checkpoints", "config.yaml", "train.log", "engine.log", "schedule.jsonl", "samples.md")
_EVENTS = "events.out.tfevents.*"


def make_root(trainer: L.Trainer) -> None:
    """Make the folder that all runs go into.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(trainer.default_root_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise reject("trainer.default_root_dir", folder, why, "give another folder") from error


def last_checkpoint(runs: Path, folder: str | Path | None) -> str:
    """Find the newest `last.ckpt` of some runs.

    Args:
        runs: The folder with a folder for each of them.
        folder: The folder of all checkpoints, if there is one (`checkpoint.dirpath`).

    Raises:
        CheckpointError: there is none.
    """
    place = runs if folder is None else Path(folder)
    found = list(place.glob("last.ckpt" if folder is not None else "*/checkpoints/last.ckpt"))
    if not found:
        raise CheckpointError(f"ckpt_path=last finds no last.ckpt of a run in {place}; give the path of a checkpoint")
    return str(max(found, key=lambda path: path.stat().st_mtime))


def discard_unused(trainer: L.Trainer) -> None:
    """Remove the folders of a run whose settings were refused, on rank 0.

    Lightning opens its loggers before models and data are looked at. A folder with anything else in it stays.
    """
    if not trainer.is_global_zero:
        return
    root = Path(trainer.default_root_dir)
    for logger in trainer.loggers:
        folder = None if logger.log_dir is None else Path(logger.log_dir)
        if folder is None or not folder.is_dir() or not folder.is_relative_to(root):
            continue
        events = list(folder.glob(_EVENTS)) if isinstance(logger, TensorBoardLogger) else []
        if set(folder.iterdir()) - set(events):
            continue
        logger.finalize("failed")
        for file in events:
            file.unlink()
        while folder != root and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def describe(trainer: L.Trainer) -> str:
    """Say which files a run has left, and where."""
    folder = trainer.log_dir
    if not trainer.loggers or folder is None:
        saved = getattr(trainer.checkpoint_callback, "dirpath", None)
        return "no logger, no files" if saved is None else f"no logger; checkpoints in {saved}"
    found = [name for name in _FILES if (Path(folder) / name).exists()]
    if any(Path(folder).glob(_EVENTS)):
        found.insert(0, "TensorBoard events")
    return f"files in {folder}: {', '.join(found)}"
