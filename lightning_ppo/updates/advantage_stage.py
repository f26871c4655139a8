"""From a chunk of trajectories to rows that can be trained: values, log-probs, masks, rewards, advantages.

Everything here runs without gradients, once per sample, under models that do not change within a PPO step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ppo.algorithms import estimate_advantages, kl_estimate, token_rewards
from lightning_ppo.batch import Chunk, TrainRow, Trajectory
from lightning_ppo.config import PPOConfig
from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.micro_batch import pad_rows, plan_micro_batches
from lightning_ppo.models.policy import PolicyModel
from lightning_ppo.models.scoring import Ragged, micro_batches, response_logprobs, unpad
from lightning_ppo.residency import Residency
from lightning_ppo.timing import PhaseTimer


@dataclass(frozen=True)
class _Scores:
    """What the models give to the rows of a chunk, by row index; empty where nothing needs it."""

    values: Ragged
    final_values: dict[int, float]
    """Value after the last response token."""
    logprobs: Ragged
    ref_logprobs: Ragged


@dataclass(frozen=True)
class AdvantageStage:
    """Values first (the critic may still be resident from waiting), then the reference, then the policy."""

    policy: PolicyModel
    critic: CriticModel
    reference: PolicyModel | None
    config: PPOConfig
    residency: Residency
    timer: PhaseTimer

    @torch.no_grad()
    def run(self, chunk: Chunk) -> tuple[TrainRow, ...]:
        """Make training rows of this rank's share of a chunk.

        Args:
            chunk: Trajectories.

        Returns:
            One row per trajectory, in the same order.
        """
        rows = chunk.rows
        config = self.config
        lengths = [row.num_tokens for row in rows]
        plan = plan_micro_batches(lengths, config.micro_batch_tokens, config.micro_batch_overhead_tokens)
        values: Ragged = {}
        final_values: dict[int, float] = {}
        self.residency.acquire("critic")
        with self.timer.phase("value"):
            for batch in micro_batches(rows, plan, self.residency.device):
                padded, final = self.critic(batch)
                unpad(padded, batch, rows, values)
                final_values.update(zip(batch.indices, final.tolist(), strict=True))
        ref_logprobs = self._logprobs(self.reference, "reference", rows, plan) if self.reference is not None else {}
        needs_old = config.old_logprobs == "recompute" and not config.ratio_is_one
        logprobs: Ragged = {}
        if needs_old or config.kl_placement == "reward":
            logprobs = self._logprobs(self.policy, "policy", rows, plan)
        old_logprobs: Ragged = logprobs if needs_old else {}
        if config.old_logprobs == "rollout":
            old_logprobs = {i: row.rollout_logprobs for i, row in enumerate(rows)}

        masks = [self._mask(row) for row in rows]
        scores = _Scores(values, final_values, logprobs, ref_logprobs)
        advantages: Ragged = {}
        returns: Ragged = {}
        for indices in plan:
            for i, advantage, target in self._estimate(rows, indices, masks, scores):
                advantages[i], returns[i] = advantage, target
        return tuple(
            TrainRow(
                trajectory=row,
                mask=masks[i],
                values=values[i],
                advantages=advantages[i],
                returns=returns[i],
                old_logprobs=old_logprobs.get(i),
                ref_logprobs=ref_logprobs.get(i),
            )
            for i, row in enumerate(rows)
        )

    def _logprobs(self, model: PolicyModel, name: str, rows: Sequence[Trajectory], plan: list[list[int]]) -> Ragged:
        self.residency.acquire(name)
        with self.timer.phase(name):
            return response_logprobs(model, rows, plan, self.residency.device)

    def _mask(self, row: Trajectory) -> Tensor:
        if row.truncated and self.config.truncated_responses == "mask":
            return torch.zeros_like(row.response_mask)
        return row.response_mask

    def _reward(self, row: Trajectory) -> float:
        if row.truncated and self.config.truncated_responses == "penalize":
            return row.reward - self.config.truncation_penalty
        return row.reward

    def _estimate(
        self, rows: Sequence[Trajectory], indices: list[int], masks: list[Tensor], scores: _Scores
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield index, advantages and returns of some rows."""
        config = self.config
        host = torch.device("cpu")
        width = max(len(rows[i].response_ids) for i in indices)

        def padded(ragged: Ragged) -> Tensor:
            return pad_rows([ragged[i] for i in indices], width, host)

        mask = pad_rows([masks[i] for i in indices], width, host)
        kl = None
        if config.kl_placement == "reward":
            kl = kl_estimate(padded(scores.logprobs), padded(scores.ref_logprobs), config.kl_type)
        value = padded(scores.values)
        rewards = torch.tensor([self._reward(rows[i]) for i in indices], dtype=value.dtype)
        bootstrap = None
        if config.bootstrap_truncated:
            bootstrap = torch.tensor(
                [scores.final_values[i] if rows[i].truncated else 0.0 for i in indices], dtype=value.dtype
            )
        advantages, returns = estimate_advantages(
            token_rewards(rewards, mask, kl, config.kl_coef if kl is not None else 0.0),
            value,
            mask,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            gae_lambda_value=config.gae_lambda_value,
            gae_lambda_policy=config.gae_lambda_policy,
            length_adaptive_alpha=config.length_adaptive_alpha,
            bootstrap=bootstrap,
        )
        for i, advantage, target in zip(indices, advantages, returns, strict=True):
            length = len(rows[i].response_ids)
            yield i, advantage[:length], target[:length]
