"""The policy's split update: begin, train_chunk as often as chunks arrive, finish (one optimizer step), abort.

Losses are sums; the denominator is the global count of trained tokens (or rows) of all chunks, micro-batches and ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ppo.algorithms import (
    PolicyLoss,
    aggregate,
    apply_whitening,
    importance_weights,
    kl_loss_terms,
    policy_loss,
)
from lightning_ppo.batch import TrainRow
from lightning_ppo.errors import StepError
from lightning_ppo.models.micro_batch import MicroBatch, pad_rows
from lightning_ppo.models.policy import PolicyModel
from lightning_ppo.updates.normalization import MAIN, REGULARIZER, UNIT, ChunkPlan
from lightning_ppo.updates.split import Losses, SplitUpdate, trainable_micro_batches


@dataclass(frozen=True)
class PolicyStats:
    """One policy update; means are over the trained tokens of all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    approx_kl: float
    """KL(old || current), k1 estimate."""
    clip_fraction: float
    ratio_mean: float
    reference_kl: float
    """KL(current || reference) in the loss, 0 without it."""
    entropy: float
    """Mean of -log-prob of the sampled tokens."""
    sampler_mismatch_kl: float
    """KL(sampler || trainer before the update), k3 estimate: how far the engine's log-probs are off."""
    sampler_mismatch_max: float
    """Largest |log-prob of the engine - log-prob of the trainer|."""
    importance_weight_mean: float
    out_of_bounds_fraction: float
    num_tokens: int
    num_sequences: int


class PolicyUpdate(SplitUpdate):
    """Accumulates policy gradients and makes the update.

    Args:
        policy: The policy.
        shared: See `SplitUpdate`.
    """

    def __init__(self, policy: PolicyModel, *shared: Any) -> None:
        super().__init__("policy", *shared)
        self.policy = policy
        self._mismatch_max = torch.zeros((), dtype=torch.float64)

    @override
    def begin(self) -> None:
        super().begin()
        self._mismatch_max = torch.zeros((), dtype=torch.float64)

    def train_chunk(self, rows: Sequence[TrainRow], plan: ChunkPlan, where: str) -> None:
        """Accumulate the gradients of some rows; rows without a trained token are passed over.

        Args:
            rows: This rank's rows.
            plan: How their advantages are normalised.
            where: Names the chunk in errors.

        Raises:
            StepError: a loss or the accumulated gradient is NaN or infinite.
        """
        losses: Losses = []
        for batch, chosen in trainable_micro_batches(rows, self.config.micro_batch_tokens, self._residency.device):
            terms = self._terms(batch, chosen, plan)
            for i, (buffer, loss) in enumerate(terms.items()):
                with self.accumulator.capture(buffer):
                    self._backward(loss, retain_graph=i < len(terms) - 1)
            losses.append(
                (sum(terms.values(), torch.zeros(())).detach(), tuple(r.trajectory.sample_id for r in chosen))
            )
        self._check(losses, rows, where)

    def finish(self, coefficients: dict[str, float]) -> PolicyStats:
        """Divide by the global count, clip, and make one optimizer step. A collective over all ranks.

        Args:
            coefficients: Factor of each gradient buffer.

        Raises:
            StepError: no token was trained on any rank, or the gradient is NaN or infinite; nothing was updated.
        """
        if not self._has_regularizer:
            # a buffer of the model's size, and its sum over ranks, for nothing but zeros
            coefficients = {name: factor for name, factor in coefficients.items() if name != REGULARIZER}
        sums = self._sums.reduced(self._ranks)
        count = sums["tokens"] if self.config.loss_level == "token" else sums["sequences"]
        if count == 0:
            raise StepError("policy update has no trained token on any rank; nothing was updated")
        norm = self._step(coefficients, count, self.config.max_grad_norm)
        mismatch = self._ranks.stack(self._mismatch_max.cpu()).max()
        tokens = sums["tokens"]
        return PolicyStats(
            loss=sum(factor * sums[f"loss_{name}"] for name, factor in coefficients.items()) / count,
            grad_norm=norm,
            approx_kl=sums["approx_kl"] / tokens,
            clip_fraction=sums["clipped"] / tokens,
            ratio_mean=sums["ratio"] / tokens,
            reference_kl=sums["kl"] / tokens,
            entropy=-sums["logprobs"] / tokens,
            sampler_mismatch_kl=sums["mismatch_kl"] / tokens,
            sampler_mismatch_max=float(mismatch),
            importance_weight_mean=sums["weights"] / tokens,
            out_of_bounds_fraction=sums["out_of_bounds"] / tokens,
            num_tokens=int(tokens),
            num_sequences=int(sums["sequences"]),
        )

    @property
    def _has_regularizer(self) -> bool:
        return self.config.kl_placement == "loss" or self.config.entropy_coef > 0

    def _terms(self, batch: MicroBatch, rows: Sequence[TrainRow], plan: ChunkPlan) -> dict[str, Tensor]:
        config, device = self.config, self._residency.device
        width = batch.mask.shape[1]

        def padded(values: Sequence[Tensor]) -> Tensor:
            return pad_rows(values, width, device)

        mask = padded([row.mask for row in rows])
        advantages = padded([row.advantages for row in rows])
        rollout_logprobs = padded([row.trajectory.rollout_logprobs for row in rows])
        logprobs, entropy = self.policy(batch, with_entropy=config.entropy_coef > 0)
        old = logprobs.detach()
        if not config.ratio_is_one:
            old = padded([row.old_logprobs for row in rows if row.old_logprobs is not None])
        weights, out_of_bounds = importance_weights(
            old,
            rollout_logprobs,
            mask,
            config.importance_correction,
            clip_min=config.importance_clip_min,
            clip_max=config.importance_clip_max,
        )

        def surrogate(advantages: Tensor) -> PolicyLoss:
            return policy_loss(
                logprobs,
                old,
                advantages,
                mask,
                clip_eps=config.clip_eps,
                clip_eps_high=config.clip_eps_high,
                dual_clip=config.dual_clip,
                level=config.loss_level,
                weights=weights,
            )

        main = surrogate(apply_whitening(advantages, mask, plan.centre, plan.scale))
        self._sums.add(clipped=main.clipped_tokens, ratio=main.ratio_sum, approx_kl=main.approx_kl_sum)
        terms = {MAIN: main.loss}
        if plan.with_unit:
            terms[UNIT] = surrogate(mask.to(advantages.dtype)).loss
        regularizer = self._regularizer(logprobs, entropy, mask, rows, padded)
        if regularizer is not None and plan.deferred:
            terms[REGULARIZER] = regularizer
        elif regularizer is not None:
            terms[MAIN] = main.loss + regularizer
        self._count(terms, logprobs.detach(), old, rollout_logprobs, mask, weights, out_of_bounds)
        return terms

    def _regularizer(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        mask: Tensor,
        rows: Sequence[TrainRow],
        padded: Callable[[Sequence[Tensor]], Tensor],
    ) -> Tensor | None:
        config = self.config
        terms: list[Tensor] = []
        if config.kl_placement == "loss":
            reference = padded([row.ref_logprobs for row in rows if row.ref_logprobs is not None])
            kl = kl_loss_terms(logprobs, reference, mask, config.kl_type)
            terms.append(config.kl_coef * aggregate(kl, mask, config.loss_level))
            self._sums.add(kl=torch.where(mask, kl.detach(), torch.zeros_like(kl)).sum())
        if entropy is not None:
            terms.append(-config.entropy_coef * aggregate(entropy, mask, config.loss_level))
        return sum(terms[1:], terms[0]) if terms else None

    @torch.no_grad()
    def _count(
        self,
        terms: dict[str, Tensor],
        logprobs: Tensor,
        old: Tensor,
        rollout: Tensor,
        mask: Tensor,
        weights: Tensor | None,
        out_of_bounds: Tensor,
    ) -> None:
        # in float32, exp(x) - 1 - x of a tiny x is rounding error of either sign
        gap = torch.where(mask, old - rollout, torch.zeros_like(old)).double()
        self._mismatch_max = torch.maximum(self._mismatch_max.to(gap.device), gap.abs().max().double())
        tokens = mask.sum()
        self._sums.add(
            tokens=tokens,
            sequences=mask.any(1).sum(),
            logprobs=torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum(),
            mismatch_kl=(torch.expm1(gap) - gap).sum(),
            weights=tokens if weights is None else torch.where(mask, weights, torch.zeros_like(weights)).sum(),
            out_of_bounds=out_of_bounds,
        )
        self._sums.add(**{f"loss_{name}": loss for name, loss in terms.items()})
