"""One decode step of attention over a static cache, reading no more of it than the rows need.

Long-tailed lengths make one window for all rows as long as the longest row. So all rows are done over a short window,
and the few rows that are longer once more, gathered, over a long one. Which rows those are changes no bit of any row:
masked positions get a share of exactly zero, and each (row, head) is a matrix product of its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_WINDOW_TOKENS = 32
# Reading a gathered row costs about this many times as much as reading a row in place (measured, copies included).
_GATHER_COST = 6
# Below this many multiplications torch leaves the BLAS for a loop of its own (bmm_out_or_baddbmm_, LinearAlgebra.cpp),
# so a window must not cross it.
_BLAS_ELEMENTS = 400


@dataclass(frozen=True)
class Windows:
    """What one step reads of the cache; `N` is rows times key-value heads."""

    mask: Tensor
    """`[N, 1, S]`: 0 where a position may be seen, minus infinity elsewhere; S is the short window."""
    long: Tensor | None
    """`[M]` int64, those of the N that need more than S; None when none does."""
    long_mask: Tensor | None
    """`[M, 1, W]`, the same over the long window."""


class CachedAttention:
    """Plans and computes attention of one new token per row against a cache of `context` positions."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, context: int, device: torch.device, dtype: torch.dtype
    ):
        self._kv_heads, self._context = kv_heads, context
        self._scale = head_dim**-0.5
        self._device, self._dtype = device, dtype
        self._columns = torch.arange(context, device=device)
        least = _BLAS_ELEMENTS * kv_heads // (heads * head_dim) + 1
        # GPU libraries, and oneDNN for bfloat16, choose their kernels by shape: there the window never changes.
        fixed = device.type != "cpu" or dtype != torch.float32
        self._least = context if fixed else min(_round_up(least), context)

    def plan(self, positions: np.ndarray, per_head: Tensor) -> Windows:
        """Choose the windows of a step.

        Args:
            positions: `[rows]` int64, position of each row's new token.
            per_head: `[N, 1]`, the same once per key-value head, on the device.
        """
        window = max(self._least, min(_round_up(int(positions.max()) + 1), self._context))
        short = np.minimum(np.arange(self._least, window + _WINDOW_TOKENS, _WINDOW_TOKENS), window)
        longer = (positions[:, None] >= short).sum(0)
        best = int((short * len(positions) + _GATHER_COST * window * longer).argmin())
        mask = self._mask(per_head, int(short[best]))
        if longer[best] == 0:
            return Windows(mask, None, None)
        rows = torch.from_numpy(np.flatnonzero(positions >= short[best])).to(self._device)
        long = (rows[:, None] * self._kv_heads + torch.arange(self._kv_heads, device=self._device)).view(-1)
        return Windows(mask, long, self._mask(per_head[long], window))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, windows: Windows) -> Tensor:
        """Attend to the positions that the plan's mask shows.

        Args:
            query: `[N, heads / kv_heads, head_dim]`.
            keys: `[N, context, head_dim]`, finite everywhere.
            values: The same shape.
            windows: The plan of this step.

        Returns:
            `[N, heads / kv_heads, head_dim]`.
        """
        short = windows.mask.shape[-1]
        mixed = self._mix(query, keys[:, :short], values[:, :short], windows.mask)
        if windows.long is not None and windows.long_mask is not None:
            long, width = windows.long, windows.long_mask.shape[-1]
            mixed[long] = self._mix(query[long], keys[:, :width][long], values[:, :width][long], windows.long_mask)
        return mixed

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(self._dtype), values)

    def _mask(self, per_head: Tensor, window: int) -> Tensor:
        unseen = self._columns[:window] > per_head
        mask = torch.zeros(unseen.shape, device=self._device, dtype=self._dtype)
        return mask.masked_fill_(unseen, float("-inf"))[:, None]


def _round_up(tokens: int) -> int:
    return -(-tokens // _WINDOW_TOKENS) * _WINDOW_TOKENS
