"""CriticWarmup: PPO steps in which only the critic learns."""

import logging
from typing import TYPE_CHECKING

import lightning as L

from lightning_ppo.hooks import PPOCallback

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule

_log = logging.getLogger(__name__)


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
        steps = pl_module.ppo.critic_warmup_steps
        if ppo_step == steps > 0:
            _log.info("critic warm-up is complete after %d step(s): the policy is trained from now on", steps)
        return ppo_step >= steps
