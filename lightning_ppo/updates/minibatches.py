"""Minibatches of a complete step: shuffled anew in every pass, the same after a resume."""

from collections.abc import Iterator, Sequence

import torch

from lightning_ppo.batch import TrainRow
from lightning_ppo.seeds import hash_seed


def shuffled_minibatches(
    rows: Sequence[TrainRow], parts: int, seed: tuple[str, int, int, int]
) -> Iterator[Sequence[TrainRow]]:
    """Deal shuffled rows into `parts` minibatches whose sizes differ by at most one; unshuffled for one part.

    Args:
        rows: All rows.
        parts: Minibatches.
        seed: Name of the model, seed of the run, PPO step and epoch: the order depends on nothing else.
    """
    if parts == 1:
        yield rows
        return
    generator = torch.Generator().manual_seed(hash_seed("minibatches", *seed))
    order = torch.randperm(len(rows), generator=generator).tolist()
    for part in range(parts):
        yield [rows[i] for i in order[part::parts]]
