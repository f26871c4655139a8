"""What an open PPO step has gathered so far on this rank, and its totals over ranks at the close."""

from dataclasses import dataclass, field

import torch

from lightning_ppo.algorithms import ExplainedVariance
from lightning_ppo.batch import Chunk, TrainRow
from lightning_ppo.ranks import Ranks


@dataclass
class StepState:
    """Rows and chunk boundaries of the open step."""

    ppo_step: int
    policy_version: int
    policy_is_trainable: bool
    rows: list[TrainRow] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    """Draws of each chunk, in order: the recorded chunk boundaries."""
    generation_s: float = 0.0

    def add(self, chunk: Chunk, rows: tuple[TrainRow, ...]) -> None:
        """Take a chunk in."""
        self.rows.extend(rows)
        self.chunks.append(chunk.draws)
        self.generation_s = max(self.generation_s, *chunk.generation_s)

    def totals(self, ranks: Ranks) -> "StepTotals":
        """Sum over ranks. A collective."""
        trajectories = [row.trajectory for row in self.rows]
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        versions = torch.cat([t.policy_versions for t in trajectories] or [torch.zeros(0, dtype=torch.int64)])
        ages = self.policy_version - versions
        sums = torch.tensor(
            [
                sum(row.trained_tokens for row in self.rows),
                sum(row.trained_tokens > 0 for row in self.rows),
                len(trajectories),
                float(rewards.sum()),
                float(rewards.square().sum()),
                len(versions),
                sum(len(t.prompt_ids) for t in trajectories),
                sum(t.truncated for t in trajectories),
                float(ages.sum()),
            ],
            dtype=torch.float64,
        )
        ranks.sum_(sums)
        oldest = int(ages.max()) if len(ages) else 0
        staleness_max = ranks.stack(torch.tensor(float(oldest), dtype=torch.float64)).max()
        return StepTotals(*[*sums.tolist(), float(staleness_max), self._fit(ranks)])

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
    reward_sum: float
    reward_square_sum: float
    response_tokens: float
    prompt_tokens: float
    truncated: float
    staleness_sum: float
    """Over response tokens, in policy versions."""
    staleness_max: float
    explained_variance: float
    """Of the returns by the values *before* the critic's update, pooled over all trained tokens."""

    def metrics(self) -> dict[str, float]:
        """Return the `rollout/` scalars and the critic's explained variance."""
        mean = self.reward_sum / self.rows
        return {
            "rollout/reward_mean": mean,
            "rollout/reward_std": max(self.reward_square_sum / self.rows - mean * mean, 0.0) ** 0.5,
            "rollout/response_length": self.response_tokens / self.rows,
            "rollout/truncated_fraction": self.truncated / self.rows,
            "rollout/staleness": self.staleness_sum / self.response_tokens,
            "rollout/staleness_max": self.staleness_max,
            "rollout/masked_fraction": 1.0 - self.tokens / self.response_tokens,
            "critic/explained_variance": self.explained_variance,
        }
