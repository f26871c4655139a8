"""Log-probs that a policy gives to responses, row by row, without gradients."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_ppo.batch import Trajectory
from lightning_ppo.models.micro_batch import MicroBatch, collate
from lightning_ppo.models.policy import PolicyModel

Ragged = dict[int, Tensor]
"""A `[T_i]` tensor on the CPU for each row index."""


def micro_batches(rows: Sequence[Trajectory], plan: list[list[int]], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a plan (see `plan_micro_batches`), on `device`."""
    for indices in plan:
        yield collate(rows, indices, device)


@torch.no_grad()
def response_logprobs(
    model: PolicyModel, rows: Sequence[Trajectory], plan: list[list[int]], device: torch.device
) -> Ragged:
    """Score responses under a policy.

    Args:
        model: The policy, on `device`; its `temperature` applies.
        rows: Trajectories.
        plan: Micro-batches, as row indices.
        device: Where the model is.

    Returns:
        `[T]` log-probs of each row's response tokens, 0 where a token was not generated.
    """
    result: Ragged = {}
    for batch in micro_batches(rows, plan, device):
        unpad(model(batch)[0], batch, rows, result)
    return result


def unpad(padded: Tensor, batch: MicroBatch, rows: Sequence[Trajectory], into: Ragged) -> None:
    """Cut a micro-batch's `[b, T]` into its rows' `[T_i]`, on the CPU.

    Args:
        padded: Values of a micro-batch.
        batch: The micro-batch.
        rows: All rows.
        into: Where the pieces go, by row index.
    """
    for i, row in zip(batch.indices, padded.cpu(), strict=True):
        into[i] = row[: len(rows[i].response_ids)]
