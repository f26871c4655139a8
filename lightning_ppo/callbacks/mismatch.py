"""MismatchCheck: an engine that samples from another distribution than the trainer's is said once."""

import logging
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_ppo.hooks import PPOCallback, PPOStepEnd

_log = logging.getLogger(__name__)

_LARGEST = 1.05
"""A server in bfloat16 is at about 1.02."""


class MismatchCheck(PPOCallback):
    """Warns when fresh rollouts have other log-probs than the trainer gives them, and nothing corrects for it.

    Such a run learns, from gradients that are wrong by a few percent, and shows it in one scalar among fifty.
    """

    def __init__(self) -> None:
        self._is_done = False

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_done = False

    @override
    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: Any, payload: PPOStepEnd) -> None:
        """Look at the step's rollouts, unless a policy that has moved since explains the difference."""
        metrics = payload.metrics
        error = metrics.get("rollout/token_mult_prob_error", 1.0)
        is_fresh = metrics["rollout/version_age_max"] == 0
        if self._is_done or not is_fresh or error <= _LARGEST or pl_module.ppo.importance_correction != "none":
            return
        self._is_done = True
        if trainer.is_global_zero:
            _log.warning(
                "rollout/token_mult_prob_error=%.3g in PPO step %d, where rollouts are fresh: the engine samples from "
                "another distribution than the trainer's; use an engine in float32, or set "
                "importance_correction=truncated",
                error,
                payload.ppo_step - 1,
            )
