"""CriticWarmup: PPO steps in which only the critic learns."""

from typing import TYPE_CHECKING

import lightning as L

from lightning_ppo.hooks import PPOCallback

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule


class CriticWarmup(PPOCallback):
    """Keeps the policy frozen for the first `critic_warmup_steps` PPO steps.

    Backward pass, update and weight transfer of the policy are skipped meanwhile; versions and counters still move.
    """

    def policy_is_trainable(self, trainer: L.Trainer, pl_module: "PPOModule", ppo_step: int) -> bool:
        """Tell whether the policy is updated in this PPO step; asked once, at the step's first chunk.

        Args:
            trainer: The trainer.
            pl_module: The module.
            ppo_step: Completed PPO steps.
        """
        return ppo_step >= pl_module.ppo.critic_warmup_steps
