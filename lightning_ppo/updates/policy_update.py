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
    ImportanceWeights,
    PolicyLoss,
    aggregate,
    apply_whitening,
    importance_weights,
    kl_loss_terms,
    masked_sum,
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
    token_mult_prob_error: float
    """Mean of exp(|log-prob of the engine - log-prob of the trainer|): 1 when they agree."""
    importance_weight_mean: float
    """Of the weights as they are used; 1 without correction, as are the next two."""
    importance_weight_raw_mean: float
    """Before any bound: shows how far off rollouts are when the bounds hide it."""
    importance_weight_raw_max: float
    out_of_bounds_fraction: float
    """Of the tokens whose weight, or whose row's criterion, was outside of the bounds or not finite."""
    importance_masked_fraction: float
    """Of the tokens whose weight is 0."""
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
        for batch, chosen in trainable_micro_batches(rows, self.config, self._residency.device):
            terms = self._terms(batch, chosen, plan)
            for i, (buffer, loss) in enumerate(terms.items()):
                with self.accumulator.capture(buffer):
                    self._backward(loss, retain_graph=i < len(terms) - 1)
            losses.append(
                (sum(terms.values(), torch.zeros(())).detach(), tuple(r.trajectory.sample_id for r in chosen))
            )
        self._check(losses, rows, where)

    def finish(self, coefficients: dict[str, float]) -> PolicyStats | None:
        """Divide by the global count, clip, and make one optimizer step. A collective over all ranks.

        Args:
            coefficients: Factor of each gradient buffer.

        Returns:
            What the update was; None if it is one of several in its PPO step and had nothing to learn from: no trained
            token on any rank, or only tokens of importance weight 0. The optimizer step is skipped then.

        Raises:
            StepError: the step's only update had nothing to learn from, or the gradient is NaN or infinite; nothing was
                updated.
        """
        if not self._has_regularizer:
            # a buffer of the model's size, and its sum over ranks, for nothing but zeros
            coefficients = {name: factor for name, factor in coefficients.items() if name != REGULARIZER}
        sums = self._sums.reduced(self._ranks)
        tokens = sums["tokens"]
        count = tokens if self.config.loss_level == "token" else sums["sequences"]
        mismatch_max, raw_weight_max = self._sums.largest(self._ranks, "mismatch", "raw_weight")
        if sums["zeroed"] == tokens:
            if self.config.updates_per_step == 1:
                raise StepError(self._nothing_to_learn(tokens, raw_weight_max))
            self.abort()
            return None
        norm = self._step(coefficients, count, self.config.max_grad_norm)
        return PolicyStats(
            loss=sum(factor * sums[f"loss_{name}"] for name, factor in coefficients.items()) / count,
            grad_norm=norm,
            approx_kl=sums["approx_kl"] / tokens,
            clip_fraction=sums["clipped"] / tokens,
            ratio_mean=sums["ratio"] / tokens,
            reference_kl=sums["kl"] / tokens,
            entropy=-sums["logprobs"] / tokens,
            sampler_mismatch_kl=sums["mismatch_kl"] / tokens,
            sampler_mismatch_max=mismatch_max,
            token_mult_prob_error=sums["mult_prob_error"] / tokens,
            importance_weight_mean=sums["weights"] / tokens,
            importance_weight_raw_mean=sums["raw_weights"] / tokens,
            importance_weight_raw_max=raw_weight_max,
            out_of_bounds_fraction=sums["out_of_bounds"] / tokens,
            importance_masked_fraction=sums["zeroed"] / tokens,
            num_tokens=int(tokens),
            num_sequences=int(sums["sequences"]),
        )

    @override
    def _score(self, batch: MicroBatch) -> Tensor:
        return self.policy(batch)[0]

    def _nothing_to_learn(self, tokens: float, raw_weight_max: float) -> str:
        if tokens == 0:
            return "policy update has no trained token on any rank; nothing was updated"
        return (
            f"importance_correction={self.config.importance_correction} gave every trained token weight 0 "
            f"(largest weight before the bounds: {raw_weight_max:.3g}), and nothing was updated; widen "
            "importance_clip_min and importance_clip_max, or let rollouts be less old"
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
        low, high = config.importance_bounds
        importance = importance_weights(
            old, rollout_logprobs, mask, config.importance_correction, clip_min=low, clip_max=high
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
                weights=importance.weights,
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
        # the engine's log-probs as old ones say nothing about the trainer's
        trainer = logprobs.detach() if config.old_logprobs == "rollout" else old
        self._count(terms, logprobs.detach(), trainer, rollout_logprobs, mask, importance)
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
        trainer: Tensor,
        rollout: Tensor,
        mask: Tensor,
        importance: ImportanceWeights,
    ) -> None:
        # in float32, exp(x) - 1 - x of a tiny x is rounding error of either sign
        gap = torch.where(mask, trainer - rollout, torch.zeros_like(trainer)).double()
        self._sums.maximum(mismatch=gap.abs().max(), raw_weight=importance.raw_max)
        self._sums.add(
            tokens=mask.sum(),
            sequences=mask.any(1).sum(),
            logprobs=torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum(),
            mismatch_kl=(torch.expm1(gap) - gap).sum(),
            mult_prob_error=masked_sum(gap.abs().exp(), mask),
            weights=importance.weight_sum,
            raw_weights=importance.raw_sum,
            out_of_bounds=importance.out_of_bounds,
            zeroed=importance.zeroed,
        )
        self._sums.add(**{f"loss_{name}": loss for name, loss in terms.items()})
