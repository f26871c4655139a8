"""Normalising advantages when a step arrives in chunks.

With one policy epoch every ratio is 1, so that the policy gradient is linear in the advantage. What is known only
at the close (a mean, a deviation) can therefore be applied to the accumulated gradient instead of to the advantages:
with g[X] the gradient of the loss with advantages X, the whitened gradient is (g[A - c] - (mean - c) g[1]) / deviation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ppo.algorithms import Moments, RunningCentre, merge_moments, whitening_of
from lightning_ppo.batch import TrainRow
from lightning_ppo.config import NormalizeAdvantages
from lightning_ppo.ranks import Ranks

MAIN, UNIT, REGULARIZER = "main", "unit", "regularizer"
"""Gradient buffers: of the advantages, of advantages that are all 1, and of terms without advantages."""


@dataclass(frozen=True)
class ChunkPlan:
    """What a chunk's backward passes do."""

    centre: float
    scale: float
    """The backward pass sees `(A - centre) * scale`."""
    deferred: bool
    """Whether the buffers are rescaled at the close, so that terms without advantages need one of their own."""
    with_unit: bool
    """Whether a second backward pass with all advantages 1 is needed."""


class AdvantageNormalizer:
    """Decides, chunk by chunk and then at the close, how advantages are normalised.

    Args:
        mode: One of `running`, `batch`, `chunk`, `off`.
        decay: Decay of the running centre.
        ranks: Moments are pooled over these.
    """

    def __init__(self, mode: NormalizeAdvantages, decay: float, ranks: Ranks) -> None:
        self.mode = mode
        self.running = RunningCentre(decay)
        self._ranks = ranks
        self._moments = Moments()
        self._origin: float | None = None

    @property
    def moments(self) -> Moments:
        """Pooled moments of the step's advantages so far, over all ranks."""
        return self._moments

    def begin(self) -> None:
        """Start a step."""
        self._moments = Moments()
        self._origin = None

    def plan(self, rows: Sequence[TrainRow], *, is_only_chunk: bool) -> ChunkPlan:
        """Take a chunk into account. A collective over all ranks.

        Args:
            rows: This rank's rows of the chunk.
            is_only_chunk: Whether the step consists of this chunk alone, so that everything is known already.
        """
        chunk = self._pooled(rows)
        self._moments = merge_moments((self._moments, chunk))
        if self._origin is None and chunk.count > 0:
            self._origin = chunk.mean
        if self.mode == "off":
            return ChunkPlan(0.0, 1.0, deferred=False, with_unit=False)
        if self.mode == "chunk":
            return ChunkPlan(*whitening_of(chunk), deferred=False, with_unit=False)
        if is_only_chunk:
            return ChunkPlan(*self._whitening(), deferred=False, with_unit=False)
        if self.mode == "running":
            return ChunkPlan(self.running.centre, 1.0, deferred=True, with_unit=False)
        return ChunkPlan(self._origin or 0.0, 1.0, deferred=True, with_unit=True)

    def coefficients(self, plan: ChunkPlan) -> dict[str, float]:
        """Factor of each gradient buffer at the close, given the step's last plan."""
        if not plan.deferred:
            return {MAIN: 1.0}
        centre, scale = self._whitening()
        factors = {MAIN: scale, REGULARIZER: 1.0}
        if plan.with_unit:
            # earlier chunks without a valid token had no origin, and contributed nothing
            factors[UNIT] = -scale * (centre - (self._origin or 0.0))
        return factors

    def state_dict(self) -> dict[str, Any]:
        """Return the running centre as plain numbers."""
        return self.running.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved running centre, with the decay of this run."""
        self.running = RunningCentre.from_state_dict(state).with_decay(self.running.decay)

    def commit(self) -> None:
        """Let the step, now completed, move the running centre."""
        self.running = self.running.updated(self._moments.mean)

    def _whitening(self) -> tuple[float, float]:
        if self.mode == "batch":
            return whitening_of(self._moments)
        centre = self.running.centre
        # with fewer than two tokens there is no deviation; the centre is known all the same
        scale = whitening_of(self._moments, centre)[1] if self._moments.count >= 2 else 1.0
        return centre, scale

    def _pooled(self, rows: Sequence[TrainRow]) -> Moments:
        local = Moments()
        if rows:
            advantages = torch.cat([row.advantages for row in rows])
            local = Moments.of(advantages, torch.cat([row.mask for row in rows]))
        return merge_moments(Moments.from_tensor(t) for t in self._ranks.stack(local.to_tensor()))
