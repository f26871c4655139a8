"""Loaders that Lightning iterates: chunks for training, prompts for validation and prediction."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_ppo.batch import Chunk, Prompt
from lightning_ppo.rollout.deal import Share
from lightning_ppo.rollout.prompts import PromptSet


class ChunkLoader:
    """The chunks of one PPO step; their number is not known. No torch DataLoader: its workers would fetch ahead.

    Args:
        ppo_step: Returns the PPO step that begins.
        next_share: Waits for the next chunk, given the step and the groups of it that were handed out already.
    """

    def __init__(self, ppo_step: Callable[[], int], next_share: Callable[[int, int], Share]) -> None:
        self._ppo_step = ppo_step
        self._next_share = next_share

    def __iter__(self) -> Iterator[Chunk]:
        """Start the next PPO step's chunks."""
        ppo_step, dispatched, index = self._ppo_step(), 0, 0
        is_closed = False
        while not is_closed:
            start = time.perf_counter()
            share = self._next_share(ppo_step, dispatched)
            dispatched += len(share.draws)
            chunk = Chunk(
                ppo_step=ppo_step,
                index=index,
                rows=share.rows,
                draws=share.draws,
                groups_dispatched=dispatched,
                groups_per_step=share.groups_in_step,
                wait_s=time.perf_counter() - start,
                generation_s=share.generation_s,
                failures=share.failures,
            )
            is_closed = chunk.is_closing
            yield chunk
            index += 1


@dataclass(frozen=True)
class PromptBatches:
    """Prompts in file order, many at a time: the engine batches by itself."""

    prompts: PromptSet
    size: int

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.prompts) // self.size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield the batches."""
        for start in range(0, len(self.prompts), self.size):
            yield [self.prompts[i] for i in range(start, min(start + self.size, len(self.prompts)))]
