"""What an open PPO step has gathered so far on this rank, and its totals over ranks at the close."""

from dataclasses import dataclass, field

import torch

from lightning_ppo.algorithms import ExplainedVariance, Moments, merge_moments
from lightning_ppo.batch import NO_FAILURES, Chunk, FailureCounts, TrainRow
from lightning_ppo.ranks import Ranks


@dataclass
class StepState:
    """Rows and chunk boundaries of the open step."""

    ppo_step: int
    policy_version: int
    policy_is_trainable: bool
    critic_warmup_steps: int
    """W: the policy versions up to this one have the same weights."""
    rows: list[TrainRow] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    """Draws of each chunk, in order: the recorded chunk boundaries."""
    generation_s: float = 0.0
    failures: FailureCounts = NO_FAILURES

    def add(self, chunk: Chunk, rows: tuple[TrainRow, ...]) -> None:
        """Take a chunk in. The one that only tells that the step lost its last groups is none."""
        self.rows.extend(rows)
        if chunk.draws:
            self.chunks.append(chunk.draws)
        self.generation_s = max((self.generation_s, *chunk.generation_s))
        self.failures = chunk.failures

    def totals(self, ranks: Ranks) -> "StepTotals":
        """Sum over ranks. A collective."""
        trajectories = [row.trajectory for row in self.rows]
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        reward_moments = Moments.of(rewards, torch.ones_like(rewards, dtype=torch.bool)).to_tensor()
        versions = torch.cat([t.policy_versions for t in trajectories] or [torch.zeros(0, dtype=torch.int64)])
        version_ages, warmup = self.policy_version - versions, self.critic_warmup_steps
        policy_ages = max(0, self.policy_version - warmup) - (versions - warmup).clamp(min=0)
        sums = {
            "tokens": sum(row.trained_tokens for row in self.rows),
            "sequences": sum(row.trained_tokens > 0 for row in self.rows),
            "rows": len(trajectories),
            "response_tokens": len(versions),
            "prompt_tokens": sum(len(t.prompt_ids) for t in trajectories),
            "truncated": sum(t.truncated for t in trajectories),
            "version_age_sum": int(version_ages.sum()),
            "policy_age_sum": int(policy_ages.sum()),
            "trajectory_age_sum": sum(self.policy_version - int(t.policy_versions.min()) for t in trajectories),
        }
        pooled = torch.tensor(list(sums.values()), dtype=torch.float64)
        ranks.sum_(pooled)
        oldest = [int(ages.max()) if len(ages) else 0 for ages in (version_ages, policy_ages)]
        version_age_max, policy_age_max = ranks.stack(torch.tensor(oldest, dtype=torch.float64)).amax(0).tolist()
        return StepTotals(
            **dict(zip(sums, pooled.tolist(), strict=True)),
            rewards=merge_moments(map(Moments.from_tensor, ranks.stack(reward_moments))),
            version_age_max=version_age_max,
            policy_age_max=policy_age_max,
            explained_variance=self._fit(ranks),
        )

    def _fit(self, ranks: Ranks) -> float:
        local = ExplainedVariance()
        if self.rows:
            local = ExplainedVariance.of(
                torch.cat([row.values for row in self.rows]),
                torch.cat([row.returns for row in self.rows]),
                torch.cat([row.mask for row in self.rows]),
            )
        pooled = ExplainedVariance()
        for other in ranks.stack(local.to_tensor()):
            pooled = pooled.merge(ExplainedVariance.from_tensor(other))
        return pooled.value


@dataclass(frozen=True)
class StepTotals:
    """Sums over all rows of all ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Rows with a trained token."""
    rows: float
    response_tokens: float
    prompt_tokens: float
    truncated: float
    version_age_sum: float
    """Over response tokens: policy versions between sampling and training, frozen warm-up versions included."""
    policy_age_sum: float
    """Over response tokens: policy updates between sampling and training."""
    trajectory_age_sum: float
    """Over rows: version age of the row's oldest token."""
    rewards: Moments
    version_age_max: float
    policy_age_max: float
    explained_variance: float
    """Of the returns by the values *before* the critic's update, pooled over all trained tokens."""

    def metrics(self) -> dict[str, float]:
        """Return the `rollout/` scalars and the critic's explained variance."""
        return {
            "rollout/reward_mean": self.rewards.mean,
            "rollout/reward_std": (self.rewards.m2 / self.rewards.count) ** 0.5,
            "rollout/response_length": self.response_tokens / self.rows,
            "rollout/truncated_fraction": self.truncated / self.rows,
            "rollout/version_age_mean": self.version_age_sum / self.response_tokens,
            "rollout/version_age_max": self.version_age_max,
            "rollout/policy_age_mean": self.policy_age_sum / self.response_tokens,
            "rollout/policy_age_max": self.policy_age_max,
            "rollout/trajectory_age_mean": self.trajectory_age_sum / self.rows,
            "rollout/masked_fraction": 1.0 - self.tokens / self.response_tokens,
            "critic/explained_variance": self.explained_variance,
        }
