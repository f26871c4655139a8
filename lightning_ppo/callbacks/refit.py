"""WeightRefit: brings new policy weights, or just a new version number, to the generators, and has it proved."""

import logging
import time
from typing import TYPE_CHECKING

import lightning as L
import torch

from lightning_ppo.hooks import BeforeRefit, PPOCallback, RefitEnd, call_hooks
from lightning_ppo.models.scoring import response_logprobs
from lightning_ppo.rollout.fingerprint import check_fingerprint

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule

_log = logging.getLogger(__name__)


class WeightRefit(PPOCallback):
    """Refits the generators after every policy update; rollouts of the next step then start on the new weights.

    It runs before the critic's epochs, so that generation overlaps them (colocated: after them). In critic warm-up only
    the number is sent.
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
        pl_module.rollouts.refit(weights, policy_version, lambda: self.verify(pl_module, policy_version))
        seconds = time.perf_counter() - start
        what = "new weights" if weights_changed else "only the number is new"
        _log.info("refit: policy version %d is served after %.3f s (%s)", policy_version, seconds, what)
        call_hooks(trainer, RefitEnd(policy_version, seconds))

    def verify(self, pl_module: "PPOModule", policy_version: int) -> float:
        """Have every replica answer a probe, and compare its log-probs with the policy's. Called on every rank.

        Args:
            pl_module: The module whose policy was sent.
            policy_version: The version it is.

        Returns:
            The largest difference; 0 for engines whose refits need no proof.

        Raises:
            EngineError: a replica serves another version or other weights.
        """
        tolerance = pl_module.rollouts.refit_tolerance
        if tolerance is None:
            return 0.0
        answers = pl_module.rollouts.probe(policy_version)
        rows = list(answers.values())
        # wherever it is: on the training device right after an update, on the host before the first one
        device = next(pl_module.policy.parameters()).device
        # inside a step Lightning computes in the precision of training; a replica computes in that of its weights
        with torch.autocast(device.type, enabled=False):
            logprobs = response_logprobs(pl_module.policy, rows, [list(range(len(rows)))], device)
        return check_fingerprint(
            tuple(answers), rows, [logprobs[i] for i in range(len(rows))], policy_version, tolerance
        )
