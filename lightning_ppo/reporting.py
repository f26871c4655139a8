"""The metrics of a PPO step, on their way to the loggers and to callbacks that monitor one."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import lightning as L
import torch


def report(trainer: L.Trainer, metrics: Mapping[str, float], ppo_step: int) -> None:
    """Make a step's metrics known, as `self.log(on_epoch=True)` would.

    `self.log` takes about a millisecond for each of some forty metrics, to aggregate what is known only once per step.

    Args:
        trainer: Its `callback_metrics` and `logged_metrics` are what ModelCheckpoint, EarlyStopping and others read.
        metrics: The same on every rank.
        ppo_step: Number of the step, from 0: the loggers' x-axis, on which Lightning puts validation too.
    """
    values = {name: torch.tensor(value) for name, value in metrics.items()}
    trainer.callback_metrics.update(values)
    trainer.logged_metrics.update(values)
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=ppo_step)


def unknown_metric(callback: str, monitor: str, metrics: Iterable[str]) -> str:
    """Say that a callback watches a metric that there is not, and which may be meant.

    Args:
        callback: The callback's class.
        monitor: What it watches.
        metrics: The metrics that there are.
    """
    known = sorted(metrics)
    found = get_close_matches(monitor, known, 2)
    instead = f"did you mean {' or '.join(found)}?" if found else f"set one, for example {known[0]}"
    if monitor.startswith("val/") and not any(name.startswith("val/") for name in known):
        instead = "give validation_prompts, which its metrics need"
    return f"trainer.callbacks={callback} has monitor={monitor!r}, which is no metric so far; {instead}"
