"""What the command line does when a run begins: write its settings down, and say what is about to be trained."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from lightning_ppo.console import parameter_count, say


class RunConfig(SaveConfigCallback):
    """Writes `config.yaml` once the run begins: a rejected setting leaves none behind."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Wait for the run to begin."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.loggers and trainer.log_dir is not None:
            super().setup(trainer, pl_module, str(trainer.state.fn))


class Headline(Callback):
    """Says what is about to be trained."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        rollout = pl_module.rollouts.rollout
        sizes = f"policy {parameter_count(pl_module.policy)}, critic {parameter_count(pl_module.critic)} parameters"
        responses = f"{rollout.num_prompts_per_step} x {rollout.num_generations_per_prompt} responses per PPO step"
        mode = "streaming" if rollout.is_streaming else "full batch"
        say(f"{sizes}; {responses}, {mode}; seed {pl_module.rollouts.run_seed}")
        say("starting the generation engine ...")
