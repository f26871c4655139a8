"""Several prompts in one prefill: which row of the batch holds which token, and which rows attend to each other.

Prompts lie back to back in the rows of a batch. How many rows that batch has depends on the length of the prompt only,
never on what else waits: a prompt alone goes through the same shapes as in a full batch. Attention is computed on
copies that start at the prompt's first token and are padded with its last one, so all its input comes from this prompt.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

Prompt = tuple[int, ...]

# More rows make a lone prompt cost more, fewer make more calls when many wait: for the quickstart's model, 64 rows cost
# 0.65 ms and 96 cost 0.84, and with 11 prompts of 11 tokens a step, 64 rows take 2.1 calls and 96 take 1.5.
_ROWS = 64
# Attention is padded to a multiple of this many tokens.
_WIDTH_TOKENS = 16


@dataclass(frozen=True)
class Pack:
    """Prompts to prefill together, and the layout of their `M` rows. A prompt's last token is not among them."""

    prompts: tuple[Prompt, ...]
    starts: tuple[int, ...]
    """First row of each prompt."""
    token_ids: np.ndarray
    """`[M]` int64; 0 in rows that hold nothing."""
    positions: np.ndarray
    """`[M]` int64, where each token stands in its prompt; 0 in rows that hold nothing."""
    calls: tuple[tuple[int, int], ...]
    """Prompts and width of each call of attention; the number of prompts depends on M and the width only."""
    sources: np.ndarray
    """`[A]` int64, the row that each padded position of those calls is copied from; A is the calls' total size."""
    targets: np.ndarray
    """`[M]` int64, the padded position that each row takes its result from; 0 in rows that hold nothing."""


class PromptPacker:
    """Puts the prompts of one step together into few packs."""

    def __init__(self, slots: int) -> None:
        """With few slots few prompts wait, and a lone one should not cost many decode steps: packs are smaller."""
        self.least_rows = min(_ROWS, _round_up(slots))

    def pack(self, prompts: Iterable[Prompt]) -> list[Pack]:
        """Distribute prompts of at least two tokens: the longest first, each into the first pack with room for it."""
        batches: list[_Batch] = []
        for prompt in sorted(prompts, key=len, reverse=True):
            rows = max(self.least_rows, _width(prompt))
            batch = next((batch for batch in batches if batch.has_room(rows, prompt)), None)
            if batch is None:
                batch = _Batch(rows)
                batches.append(batch)
            batch.add(prompt)
        return [batch.lay_out() for batch in batches]


class _Batch:
    def __init__(self, rows: int) -> None:
        self._rows = self._free = rows
        self._prompts: list[Prompt] = []
        self._of_width: Counter[int] = Counter()

    def has_room(self, rows: int, prompt: Prompt) -> bool:
        width = _width(prompt)
        return rows == self._rows and len(prompt) <= self._free + 1 and self._of_width[width] < self._most(width)

    def add(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)
        self._free -= len(prompt) - 1
        self._of_width[_width(prompt)] += 1

    def lay_out(self) -> Pack:
        token_ids, positions, targets = np.zeros((3, self._rows), dtype=np.int64)
        starts: list[int] = []
        calls: list[tuple[int, int]] = []
        sources: list[np.ndarray] = []
        row = padded = 0
        # Longest first, so prompts of one width are neighbours.
        for width, prompts in groupby(self._prompts, _width):
            calls.append((self._most(width), width))
            source = np.zeros(calls[-1], dtype=np.int64)
            columns = np.arange(width)
            for number, prompt in enumerate(prompts):
                known = len(prompt) - 1
                rows = slice(row, row + known)
                token_ids[rows], positions[rows] = prompt[:known], columns[:known]
                targets[rows] = columns[:known] + (padded + number * width)
                source[number] = row + np.minimum(columns, known - 1)
                starts.append(row)
                row += known
            sources.append(source.ravel())
            padded += source.size
        return Pack(
            *(tuple(self._prompts), tuple(starts), token_ids, positions),
            *(tuple(calls), np.concatenate(sources), targets),
        )

    def _most(self, width: int) -> int:
        # No more than fit if each is as short as the width allows, nor than fit if they fill half of it.
        return max(1, min(self._rows // (width - _WIDTH_TOKENS + 1), 2 * self._rows // width))


def _width(prompt: Prompt) -> int:
    return _round_up(len(prompt) - 1)


def _round_up(tokens: int) -> int:
    return -(-tokens // _WIDTH_TOKENS) * _WIDTH_TOKENS
