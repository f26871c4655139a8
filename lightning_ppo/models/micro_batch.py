"""Rows of different lengths become right-padded micro-batches of similar lengths under a token budget.

Right padding under a causal model needs no attention mask: no real token ever attends to a pad token.

Shapes: `b` rows, `S` longest prompt plus response, `T` longest response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ppo.batch import Trajectory

PAD_ID = 0
"""What fills the padding; any id of the vocabulary does, since nothing attends to it and nothing reads its output."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a chunk, padded together, on the device of the model."""

    indices: tuple[int, ...]
    """Which rows these are, as positions in the sequence the micro-batches were made from."""
    input_ids: Tensor
    """`[b, S]` int64."""
    response_ids: Tensor
    """`[b, T]` int64; `PAD_ID` after the response."""
    state_index: Tensor
    """`[b, T]` int64: position in `S` of the state before each response token, whose output predicts that token."""
    final_index: Tensor
    """`[b]` int64: position in `S` of the last token, whose output is about the state after the response."""
    mask: Tensor
    """`[b, T]` bool: generated tokens."""


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, overhead_tokens: int) -> list[list[int]]:
    """Partition rows, sorted by length, into the micro-batches that cost least.

    A micro-batch costs its padded tokens (rows times longest row) plus `overhead_tokens`. Filling micro-batches up to
    `max_tokens` instead would pad a chunk of few rows of very different lengths to more than twice its tokens.

    Args:
        lengths: Tokens per row.
        max_tokens: Most padded tokens per micro-batch; a longer row stands alone.
        overhead_tokens: What a micro-batch costs whatever its size, in tokens.

    Returns:
        Row indices, shortest rows first; a pure function of the arguments.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    num_rows = len(order)
    least_cost = np.zeros(num_rows + 1, dtype=np.int64)
    first = [0] * (num_rows + 1)
    for end in range(1, num_rows + 1):
        longest = lengths[order[end - 1]]
        start = max(0, end - max(1, max_tokens // longest))
        costs = least_cost[start:end] + np.arange(end - start, 0, -1) * longest
        # the first of equals, which makes fewer micro-batches
        best = int(costs.argmin())
        first[end] = start + best
        least_cost[end] = costs[best] + overhead_tokens
    plan: list[list[int]] = []
    end = num_rows
    while end:
        plan.append(order[first[end] : end])
        end = first[end]
    return plan[::-1]


def collate(rows: Sequence[Trajectory], indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Pad the chosen rows together.

    Args:
        rows: All rows.
        indices: Which of them to take.
        device: Where the model is.
    """
    chosen = [rows[i] for i in indices]
    prompt_lengths = torch.tensor([len(row.prompt_ids) for row in chosen])
    response_lengths = torch.tensor([len(row.response_ids) for row in chosen])
    width = int((prompt_lengths + response_lengths).max())
    response_width = int(response_lengths.max())
    is_token = torch.arange(width) < (prompt_lengths + response_lengths)[:, None]
    is_response = torch.arange(response_width) < response_lengths[:, None]
    tokens = torch.cat([ids for row in chosen for ids in (row.prompt_ids, row.response_ids)])
    responses = torch.cat([row.response_ids for row in chosen])
    input_ids = torch.full(is_token.shape, PAD_ID).masked_scatter_(is_token, tokens)
    response_ids = torch.full(is_response.shape, PAD_ID).masked_scatter_(is_response, responses)
    generated = torch.cat([row.response_mask for row in chosen])
    mask = torch.zeros_like(is_response).masked_scatter_(is_response, generated)
    final_index = prompt_lengths + response_lengths - 1
    state_index = (prompt_lengths[:, None] + torch.arange(response_width) - 1).clamp(max=width - 1)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=input_ids.to(device, non_blocking=True),
        response_ids=response_ids.to(device, non_blocking=True),
        state_index=state_index.to(device, non_blocking=True),
        final_index=final_index.to(device, non_blocking=True),
        mask=mask.to(device, non_blocking=True),
    )


def pad_rows(values: Sequence[Tensor], width: int, device: torch.device) -> Tensor:
    """Pad ragged `[T_i]` tensors to `[b, width]` with zeros (False for bool)."""
    padded = nn.utils.rnn.pad_sequence(list(values), batch_first=True)
    if padded.shape[1] < width:
        padded = nn.functional.pad(padded, (0, width - padded.shape[1]))
    return padded.to(device, non_blocking=True)
