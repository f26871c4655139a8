"""CriticEpochs: how the critic is trained once the policy's step is closed."""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import lightning as L
from typing_extensions import override

from lightning_ppo.batch import StepBatch, TrainRow
from lightning_ppo.hooks import CriticEpochEnd, PPOCallback, call_hooks
from lightning_ppo.updates.critic_update import CriticStats
from lightning_ppo.updates.minibatches import shuffled_minibatches

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule

_log = logging.getLogger(__name__)


class CriticEpochs(PPOCallback):
    """Trains the critic on the assembled step with frozen returns and old values.

    `critic_ppo_epochs` passes; each is one optimizer step over all rows, or `critic_minibatches` shuffled ones.
    Replace `train` to train it in another way.
    """

    def train(
        self, trainer: L.Trainer, pl_module: "PPOModule", batch: StepBatch
    ) -> tuple[tuple[CriticStats, ...], ...]:
        """Train the critic, which is resident. Called on every rank, after the policy's update and the refit.

        Args:
            trainer: The trainer.
            pl_module: Its `critic_update` has begin, train_chunk, finish and abort.
            batch: This rank's rows of the step.

        Returns:
            One tuple of stats per epoch, one entry per optimizer step; empty when the critic was not trained.

        Raises:
            StepError: a loss or a gradient is not finite.
        """
        epochs: list[tuple[CriticStats, ...]] = []
        update = pl_module.critic_update
        for epoch in range(pl_module.ppo.critic_ppo_epochs):
            stats: list[CriticStats] = []
            for rows in self.minibatches(pl_module, batch, epoch):
                update.begin()
                update.train_chunk(rows, f"critic epoch {epoch} of PPO step {batch.ppo_step}")
                stats.append(update.finish())
            epochs.append(tuple(stats))
            call_hooks(trainer, CriticEpochEnd(epoch, epochs[-1]))
        updates = sum(one.num_tokens > 0 for stats in epochs for one in stats)
        counts = (batch.ppo_step, len(batch.rows), len(epochs), updates)
        _log.info("critic: step %d: %d row(s), %d epoch(s), %d update(s)", *counts)
        return tuple(epochs)

    def minibatches(self, pl_module: "PPOModule", batch: StepBatch, epoch: int) -> Iterator[Sequence[TrainRow]]:
        """Yield this rank's rows of each optimizer step; the same number on every rank.

        Args:
            pl_module: Tells `critic_minibatches` and the seed.
            batch: The step.
            epoch: The pass; the shuffle depends on (seed, PPO step, epoch) only.
        """
        parts = pl_module.ppo.critic_minibatches
        yield from shuffled_minibatches(batch.rows, parts, ("critic", pl_module.seed, batch.ppo_step, epoch))


class FrozenCritic(CriticEpochs):
    """Never trains the critic.

    With the default zero head all values stay 0; with `normalize_advantages: batch` that is REINFORCE with the batch's
    mean as baseline, the yardstick for what a critic is worth.
    """

    @override
    def train(
        self, trainer: L.Trainer, pl_module: "PPOModule", batch: StepBatch
    ) -> tuple[tuple[CriticStats, ...], ...]:
        """Do nothing."""
        return ()
