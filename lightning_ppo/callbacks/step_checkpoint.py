"""StepCheckpoint: Lightning's ModelCheckpoint that never leaves the end of a run unsaved."""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class StepCheckpoint(ModelCheckpoint):
    """Saves every `every_n_train_steps` PPO steps, and after the last one whatever its number.

    Lightning's own would lose the steps since the last multiple. All arguments are those of `ModelCheckpoint`.
    """

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_known = self.monitor is None or self.monitor in trainer.callback_metrics
        if trainer.global_step > 0 and is_known and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        super().on_train_end(trainer, pl_module)
