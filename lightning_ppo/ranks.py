"""The few collectives that the PPO step needs; the identity on one process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Data-parallel ranks."""

    rank: int
    world_size: int
    sum_: Callable[[Tensor], None]
    """Sums a tensor over all ranks, in place."""

    @classmethod
    def single(cls) -> "Ranks":
        """One process alone."""
        return cls(rank=0, world_size=1, sum_=lambda _: None)

    def stack(self, local: Tensor) -> Tensor:
        """Collect every rank's tensor of the same shape into `[world_size, ...]`, on every rank."""
        stacked = torch.zeros((self.world_size, *local.shape), dtype=local.dtype, device=local.device)
        stacked[self.rank] = local
        self.sum_(stacked)
        return stacked
