"""Loaders that Lightning iterates: chunks for training, prompts for validation and prediction."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_ppo.batch import Chunk, Prompt
from lightning_ppo.rollout.prompts import PromptSet


class ChunkLoader:
    """A loader of unknown length. No torch DataLoader: its workers would fetch ahead of the refit.

    Args:
        chunks: Starts the chunks of the current PPO step.
    """

    def __init__(self, chunks: Callable[[], Iterator[Chunk]]) -> None:
        self._start = chunks

    def __iter__(self) -> Iterator[Chunk]:
        """Start the next PPO step's chunks."""
        return self._start()


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
