"""Numbers for the logs. They are pooled as sums or moments and divided once: means of shards are never averaged."""

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import require_same_shape
from lightning_ppo.algorithms.whitening import Moments

_SMALLEST_VARIANCE = 1e-8


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy, in nats, of the distribution over the last dimension.

    Args:
        logits: `[..., V]`, floating point; -inf excludes a token (0 * log 0 counts as 0, also in the gradient). The
            computation is in float32 at least.

    Returns:
        `[...]`, differentiable.

    Source: Shannon 1948, "A Mathematical Theory of Communication", section 6.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    finite = torch.where(logprobs == -torch.inf, logprobs.new_zeros(()), logprobs)
    return -(logprobs.exp() * finite).sum(-1)


def ratio_or_nan(total: float | Tensor, count: float | Tensor) -> float:
    """Return total / count, or NaN when nothing was counted: a mean of nothing is unknown, not 0 and not an error."""
    return float(total) / float(count) if float(count) != 0 else math.nan


@dataclass(frozen=True)
class ExplainedVariance:
    """Share of the returns' variance that the critic's values explain, pooled over micro-batches, chunks and ranks.

    Feed it the values and returns of the *unchanged* critic: after the critic's update the number describes the fit to
    its own targets. Population variances.

    Source: one minus the fraction of variance unexplained (coefficient of determination with the residuals' own mean
    removed), as used for critics since Schulman et al. 2015 (arXiv:1506.02438).
    """

    returns: Moments = field(default_factory=Moments)
    residuals: Moments = field(default_factory=Moments)
    """Of returns - values."""

    @classmethod
    def of(cls, values: Tensor, returns: Tensor, mask: Tensor) -> Self:
        """Measure `[B, T]` values and returns where `mask` (bool) is True.

        Raises:
            ValueError: the shapes differ.
        """
        require_same_shape(mask, values=values, returns=returns)
        return cls(Moments.of(returns, mask), Moments.of(returns.detach().double() - values.detach().double(), mask))

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        """Return the accumulator over both sets of tokens."""
        return ExplainedVariance(self.returns.merge(other.returns), self.residuals.merge(other.residuals))

    @property
    def value(self) -> float:
        """1 - Var(returns - values) / Var(returns); 0.0 for fewer than two tokens or a variance of at most 1e-8."""
        count = self.returns.count
        if count < 2 or self.returns.m2 / count <= _SMALLEST_VARIANCE:
            return 0.0
        return 1.0 - self.residuals.m2 / self.returns.m2

    def to_tensor(self) -> Tensor:
        """Return both moments as a float64 `[6]` on the CPU, to be gathered over ranks."""
        return torch.cat([self.returns.to_tensor(), self.residuals.to_tensor()])

    @classmethod
    def from_tensor(cls, packed: Tensor) -> Self:
        """Rebuild what `to_tensor` packed."""
        return cls(Moments.from_tensor(packed[:3]), Moments.from_tensor(packed[3:]))
