"""MonitorCheck: a monitor that no metric has the name of is said once, early, with what may be meant."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_ppo.reporting import unknown_metric
from lightning_ppo.rollout.datamodule import RolloutDataModule


class MonitorCheck(Callback):
    """Looks for the metrics that `ModelCheckpoint` and `EarlyStopping` watch, after the first step and its validation.

    Without its metric a `ModelCheckpoint` that saves by steps waits for a validation that brings it, and keeps nothing
    for the whole run, without a word. The first step is that after critic warm-up, in which the policy has no metrics.
    """

    def __init__(self) -> None:
        self._is_trained = self._is_validated = self._is_done = False

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_trained = self._is_validated = self._is_done = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_validated = self._is_validated or not trainer.sanity_checking

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._is_trained = trainer.global_step > pl_module.ppo.critic_warmup_steps

    # what others log when an epoch ends is known from here on

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._check(trainer, pl_module.rollouts)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._check(trainer, pl_module.rollouts)

    def _check(self, trainer: L.Trainer, rollouts: RolloutDataModule) -> None:
        validates = trainer.enable_validation and rollouts.validation_prompts is not None
        if self._is_done or not self._is_trained or (validates and not self._is_validated):
            return
        self._is_done = True
        known = trainer.callback_metrics
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            monitor = _watched(callback)
            if monitor is not None and monitor not in known:
                rank_zero_warn(unknown_metric(type(callback).__name__, monitor, known))


def _watched(callback: Callback) -> str | None:
    """The metric that a callback watches and goes on without; the strict `EarlyStopping` ends the run by itself."""
    if isinstance(callback, ModelCheckpoint):
        # it knows these two itself
        return None if callback.monitor in ("epoch", "step") else callback.monitor
    if isinstance(callback, EarlyStopping) and not callback.strict:
        return callback.monitor
    return None
