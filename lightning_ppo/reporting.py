"""The metrics of a PPO step, on their way to the loggers and to callbacks that monitor one."""

from collections.abc import Mapping

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
