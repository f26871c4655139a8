"""StepCheckpoint: Lightning's ModelCheckpoint for PPO steps, ranked by their own validation; the last is never lost."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_ppo.strategy import StreamingPPOStrategy


class StepCheckpoint(ModelCheckpoint):
    """Saves every `every_n_train_steps` PPO steps, and after the last one whatever its number.

    Lightning's own would lose the steps since the last multiple. All arguments are those of `ModelCheckpoint`.

    With a `monitor` that validation brings, what is due waits for the next validation, and what was validated is saved:
    Lightning's own saves before it, ranked by what an older policy got. `last.ckpt` is the newest step that was saved
    or found wanting: with `save_last: link` a link to its file, or a file if it has none.
    """

    _was_known = False
    """Whether the monitored metric was there when the validation began."""
    _is_of_validation = False
    _validated_step = 0

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy, every = trainer.strategy, self._every_n_train_steps
        # inside a step, the counters are those of the one before
        is_inside = isinstance(strategy, StreamingPPOStrategy) and strategy.open_step is not None
        is_due = every > 0 and trainer.global_step % every == 0 and not is_inside
        if not is_due or self._should_skip_saving_checkpoint(trainer):
            return
        if self._is_of_validation or not self._is_known(trainer):
            self._defer_save_until_validation = True
        else:
            self._save(trainer, is_ranked=True)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._was_known = self._is_known(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated_step = trainer.global_step
        if not self._was_known and self._is_known(trainer) and not trainer.sanity_checking:
            self._is_of_validation = True
        # Lightning's own forgets what is due if it validates after every epoch, and otherwise ends the run where there
        # is no such metric yet, as those of the policy in critic warm-up
        if not self._defer_save_until_validation:
            super().on_validation_end(trainer, pl_module)
        elif self._is_known(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._defer_save_until_validation = False
            self._save(trainer, is_ranked=True)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step > 0 and not self._should_skip_saving_checkpoint(trainer):
            is_old = self._is_of_validation and self._validated_step != trainer.global_step
            self._save(trainer, is_ranked=self._is_known(trainer) and not is_old)
        super().on_train_end(trainer, pl_module)

    def _is_known(self, trainer: L.Trainer) -> bool:
        return self.monitor is None or self.monitor in trainer.callback_metrics

    def _save(self, trainer: L.Trainer, *, is_ranked: bool) -> None:
        candidates, kind = self._monitor_candidates(trainer), self.save_last
        if is_ranked:
            self._save_topk_checkpoint(trainer, candidates)
        if kind == "link" and self._last_global_step_saved != trainer.global_step:
            # the last file was good enough, but is of an older step
            self.save_last = True
        try:
            self._save_last_checkpoint(trainer, candidates)
        finally:
            self.save_last = kind
