"""WeightRefit: brings new policy weights, or just a new version number, to the generators."""

import time
from typing import TYPE_CHECKING

import lightning as L

from lightning_ppo.hooks import BeforeRefit, PPOCallback, RefitEnd, call_hooks

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule


class WeightRefit(PPOCallback):
    """Refits the generators after every policy update; rollouts of the next step then start on the new weights.

    It runs before the critic's epochs, so that generation overlaps them. In critic warm-up only the number is sent.
    """

    def refit(self, trainer: L.Trainer, pl_module: "PPOModule", policy_version: int, *, weights_changed: bool) -> None:
        """Make the generators serve the policy as `policy_version`. Called on every rank.

        Args:
            trainer: The trainer.
            pl_module: The module whose policy to export.
            policy_version: The version it is.
            weights_changed: False in critic warm-up.
        """
        call_hooks(trainer, BeforeRefit(policy_version, weights_changed))
        start = time.perf_counter()
        weights = pl_module.export_policy() if weights_changed else ()
        pl_module.rollouts.refit(weights, policy_version)
        call_hooks(trainer, RefitEnd(policy_version, time.perf_counter() - start))
