"""Normalisation of advantages: exact statistics that can be merged over micro-batches, chunks and ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import require_same_shape, zero_masked

EPSILON = 1e-8
"""Added to the variance under the root, so that one unit of advantage is amplified at most 10000 times."""

_RELATIVE_RESOLUTION = 1e-7
"""About one unit in the last place of float32; a deviation below it relative to the values is rounding."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers, in float64.

    Deviations are taken about the mean and never as E[x^2] - E[x]^2, which cancels.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance: Analysis and Recommendations"
    (two-pass algorithm and pairwise update).
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared deviations from the mean."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Return the moments of `x` where `mask` (bool, same shape) is True; masked positions may hold anything.

        Equal numbers give exactly that mean and exactly 0 deviation: the first number is subtracted before averaging.

        Raises:
            ValueError: `x` and `mask` differ in shape.
        """
        require_same_shape(mask, x=x)
        selected = x.detach()[mask].double()
        if selected.numel() == 0:
            return cls()
        shift = selected[0]
        mean = shift + (selected - shift).mean()
        m2 = (selected - mean).square().sum()
        return cls(float(selected.numel()), float(mean), float(m2))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of numbers together."""
        if self.count == 0:
            return other
        if other.count == 0:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / count)
        return Moments(count, mean, m2)

    @property
    def variance(self) -> float:
        """Unbiased variance (sum of squares over count - 1); 0.0 for fewer than two numbers."""
        return self.m2 / (self.count - 1) if self.count >= 2 else 0.0

    def square_about(self, centre: float) -> float:
        """Return the sum of squared deviations about `centre` instead of the mean."""
        offset = self.mean - centre
        return self.m2 + self.count * (offset * offset)

    def to_tensor(self) -> Tensor:
        """Return (count, mean, m2) as a float64 `[3]` on the CPU, to be gathered over ranks."""
        return torch.tensor([self.count, self.mean, self.m2], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, packed: Tensor) -> Self:
        """Rebuild what `to_tensor` packed."""
        count, mean, m2 = packed.tolist()
        return cls(count, mean, m2)


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all parts together, merged from left to right; of nothing, the empty moments."""
    total = Moments()
    for part in parts:
        total = total.merge(part)
    return total


def whitening_of(moments: Moments, centre: float | None = None) -> tuple[float, float]:
    """Return (centre, scale) such that the normalised advantage is (A - centre) * scale.

    scale = 1 / sqrt(S / (count - 1) + EPSILON), where S is the sum of squared deviations about the centre; about the
    mean this is the unbiased variance.

    * Fewer than two numbers: (0.0, 1.0), that is, not normalised.
    * No deviation: scale 0.0, so that every normalised advantage, and with it the policy gradient, is exactly 0. The
      rule is S <= count * (1e-7 * max(|mean|, |centre|))^2: a root mean square deviation at or below the resolution of
      float32 is rounding. Equal numbers about their own mean have S exactly 0.

    Args:
        moments: Of all valid advantages that are normalised together.
        centre: What to centre on; None means the moments' own mean.

    Source: the unbiased form of Andrychowicz et al. 2021, "What Matters for On-Policy Deep Actor-Critic Methods?"
    (arXiv:2006.05990), "per minibatch advantage normalization".
    """
    if moments.count < 2:
        return 0.0, 1.0
    centre = moments.mean if centre is None else centre
    square = moments.square_about(centre)
    negligible = _RELATIVE_RESOLUTION * max(abs(moments.mean), abs(centre))
    if square <= moments.count * (negligible * negligible):
        return centre, 0.0
    return centre, 1.0 / math.sqrt(square / (moments.count - 1) + EPSILON)


def apply_whitening(advantages: Tensor, mask: Tensor, centre: float, scale: float) -> Tensor:
    """Return (advantages - centre) * scale at valid positions and 0 at masked ones.

    Args:
        advantages: `[B, T]`; not modified.
        mask: `[B, T]` bool.
        centre: As returned by `whitening_of`.
        scale: As returned by `whitening_of`.

    Raises:
        ValueError: `advantages` and `mask` differ in shape.
    """
    require_same_shape(mask, advantages=advantages)
    # in two steps: a large centre does not fit a float32, and its rounding error would shift every advantage
    coarse = float(torch.tensor(centre, dtype=advantages.dtype))
    return zero_masked((advantages - coarse - (centre - coarse)) * scale, mask)


@dataclass(frozen=True)
class RunningCentre:
    """Bias-corrected exponential mean of the mean advantages of earlier PPO steps.

    Source: the bias correction of Kingma and Ba 2015, "Adam" (arXiv:1412.6980), section 3.

    Raises:
        ValueError: `decay` is outside [0, 1).
    """

    decay: float
    biased_mean: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay={self.decay} is out of range; set a number >= 0 and below 1")

    @property
    def centre(self) -> float:
        """What the coming step is centred on; 0.0 before the first."""
        return self.biased_mean / (1.0 - self.decay**self.steps) if self.steps else 0.0

    def updated(self, batch_mean: float) -> "RunningCentre":
        """Return the centre that knows one more step."""
        biased_mean = self.decay * self.biased_mean + (1.0 - self.decay) * batch_mean
        return RunningCentre(self.decay, biased_mean, self.steps + 1)

    def with_decay(self, decay: float) -> "RunningCentre":
        """Return the same centre, known from as many steps, that goes on with another decay."""
        if decay == self.decay:
            return self
        return RunningCentre(decay, self.centre * (1.0 - decay**self.steps), self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {"decay": self.decay, "biased_mean": self.biased_mean, "steps": self.steps}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Rebuild what `state_dict` returned."""
        return cls(float(state["decay"]), float(state["biased_mean"]), int(state["steps"]))
