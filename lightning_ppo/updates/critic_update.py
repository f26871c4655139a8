"""The critic's split update: the same begin / train_chunk / finish / abort as the policy's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ppo.algorithms import value_loss
from lightning_ppo.batch import TrainRow
from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.micro_batch import MicroBatch, pad_rows
from lightning_ppo.updates.normalization import MAIN
from lightning_ppo.updates.split import Losses, SplitUpdate, trainable_micro_batches


@dataclass(frozen=True)
class CriticStats:
    """One critic update; means are over the trained tokens of all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    num_tokens: int


class CriticUpdate(SplitUpdate):
    """Accumulates critic gradients and makes the update.

    Args:
        critic: The critic.
        shared: See `SplitUpdate`.
    """

    def __init__(self, critic: CriticModel, *shared: Any) -> None:
        super().__init__("critic", *shared)
        self.critic = critic

    def train_chunk(self, rows: Sequence[TrainRow], where: str) -> None:
        """Accumulate the gradients of some rows, micro-batch by micro-batch.

        Args:
            rows: This rank's rows, with frozen returns and old values.
            where: Names them in errors.

        Raises:
            StepError: a loss or the accumulated gradient is NaN or infinite.
        """
        config, device = self.config, self._residency.device
        losses: Losses = []
        for batch, chosen in trainable_micro_batches(rows, config, device):
            width = batch.mask.shape[1]
            mask = pad_rows([row.mask for row in chosen], width, device)
            values, _ = self.critic(batch)
            result = value_loss(
                values,
                pad_rows([row.values for row in chosen], width, device),
                pad_rows([row.returns for row in chosen], width, device),
                mask,
                clip_eps=config.value_clip_eps,
                scale=config.value_loss_scale,
            )
            with self.accumulator.capture(MAIN):
                self._backward(result.loss)
            self._sums.add(tokens=mask.sum(), loss_main=result.loss, clipped=result.clipped_tokens)
            losses.append((result.loss.detach(), tuple(row.trajectory.sample_id for row in chosen)))
        self._check(losses, rows, where)

    def finish(self) -> CriticStats:
        """Divide by the global count of trained tokens, clip, and make one optimizer step. A collective.

        Rows that are all masked are no reason to move: without a trained token the step is skipped.

        Raises:
            StepError: the gradient is NaN or infinite.
        """
        sums = self._sums.reduced(self._ranks)
        tokens = sums["tokens"]
        if tokens == 0:
            self.abort()
            return CriticStats(loss=0.0, grad_norm=0.0, clip_fraction=0.0, num_tokens=0)
        norm = self._step({MAIN: 1.0}, tokens, self.config.max_critic_grad_norm)
        return CriticStats(
            loss=sums["loss_main"] / tokens,
            grad_norm=norm,
            clip_fraction=sums["clipped"] / tokens,
            num_tokens=int(tokens),
        )

    @override
    def _score(self, batch: MicroBatch) -> Tensor:
        return self.critic(batch)[0]
