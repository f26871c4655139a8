"""Writes a run's schedule while it trains, and compares a repeated run's policy with the recorded one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_ppo.rollout.group_record import GroupRecord
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.run_header import RunHeader
from lightning_ppo.rollout.schedule import ChunkSchedule

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScheduleLog:
    """Writes the schedule of one run; on the rank that generates.

    Args:
        path: The file; None writes none.
        header: The run's settings.
        recorded: The run that is repeated, if one is.
    """

    def __init__(self, path: Path | None, header: RunHeader, recorded: RecordedRun | None = None) -> None:
        self._path = path
        self._header = header
        self._recorded = recorded
        self._weights: int | None = None

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights on their way to the engine, and remember their checksum (none: the last one)."""
        if self._path is None and self._recorded is None:
            # a pass over all weights that nobody would read
            yield from weights
            return
        sums = []
        for name, tensor in weights:
            # on the tensor's device, fetched when all are under way
            sums.append(bit_sum(tensor))
            yield name, tensor
        if sums:
            self._weights = sum(map(int, sums)) % 2**63

    def check_start(self, ppo_step: int) -> None:
        """Check that a repeated run can start with this step, before anything does.

        Raises:
            CheckpointError: see `RecordedRun.check_start`.
        """
        if self._recorded is not None:
            self._recorded.check_start(ppo_step)

    def check_weights(self, version: int) -> None:
        """Compare what the engine serves with what the recorded run had it serve.

        Raises:
            RolloutError: see `RecordedRun.check_weights`.
        """
        if self._recorded is not None:
            self._recorded.check_weights(version, self._weights)

    def start(self, ppo_step: int) -> None:
        """Write the header: rollouts start for this step.

        Raises:
            RolloutError: the file cannot be written.
        """
        if self._path is not None:
            ChunkSchedule.start(self._path, replace(self._header, ppo_step=ppo_step, weights=self._weights))

    def trained(self, ppo_step: int, chunks: Sequence[Sequence[int]], groups: Iterable[GroupRecord]) -> None:
        """Write a finished PPO step.

        Args:
            ppo_step: The step.
            chunks: Draws of each of its chunks.
            groups: Records of its groups, in the order of the chunks' draws.

        Raises:
            RolloutError: the file cannot be written.
        """
        if self._path is not None:
            ChunkSchedule.append(self._path, ppo_step, chunks, groups, self._weights)


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits read as whole numbers, modulo 2^64: int64, exact in whatever order.

    Eight bytes at a time where they divide so, which is many times faster on a CPU than widening every element.
    """
    bits = tensor.detach().contiguous().flatten()
    if bits.numel() * bits.element_size() % 8 == 0 and bits.storage_offset() * bits.element_size() % 8 == 0:
        return bits.view(torch.int64).sum()
    return bits.view(_BITS[bits.element_size()]).sum(dtype=torch.int64)
