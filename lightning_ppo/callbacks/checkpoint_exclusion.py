"""CheckpointExclusion: what happens to a checkpoint that somebody asks for in the middle of a PPO step."""

from typing import Literal, get_args

import lightning as L
from typing_extensions import override

from lightning_ppo.hooks import PPOCallback
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.validation import check_choice

Mode = Literal["defer", "error"]


class CheckpointExclusion(PPOCallback):
    """Keeps checkpoints out of the window from a step's first chunk until its counters have moved.

    Args:
        mode: `defer` writes the checkpoint at the end of the step under the name asked for; `error` raises. None means
            the class's own.

    Raises:
        ConfigError: there is no such mode.
    """

    mode: Mode = "defer"

    def __init__(self, mode: Mode | None = None) -> None:
        if mode is not None:
            self.mode = mode
        check_choice("mode", self.mode, get_args(Mode))

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, StreamingPPOStrategy):
            trainer.strategy.on_busy_checkpoint = self.mode
