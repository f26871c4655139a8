"""Which model is on the training device. Policy, critic and reference take turns; at most one is there.

On a CPU nothing moves and the ledger alone tells, so that tests can read it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Resident:
    """A model that takes its turn, with the optimizer whose state travels with it."""

    model: nn.Module
    optimizer: Optimizer | None = None
    host_copies: dict[int, Tensor] = field(default_factory=dict)
    """Pinned memory for each tensor, kept so that it is allocated once."""


class Residency:
    """Moves models between host and device, and keeps a ledger of who is there.

    Gradient buffers are not its business: they stay where they are (see `accumulator`).

    Args:
        device: The training device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger: list[tuple[str, str]] = []
        """Every `(load | offload, name)` in order."""
        self._members: dict[str, Resident] = {}
        self._resident: str | None = None

    @property
    def resident(self) -> str | None:
        """Name of the model on the device, or None."""
        return self._resident

    def add(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Register a model, off the device."""
        self._members[name] = Resident(model, optimizer)
        self._move(self._members[name], to_device=False)

    def acquire(self, name: str) -> None:
        """Make a model resident; the one before it leaves first. Nothing happens if it is there already."""
        if self._resident == name:
            return
        self.release()
        self._move(self._members[name], to_device=True)
        self.ledger.append(("load", name))
        self._resident = name

    def release(self) -> None:
        """Take whoever is resident off the device."""
        if self._resident is None:
            return
        self._move(self._members[self._resident], to_device=False)
        self.ledger.append(("offload", self._resident))
        self._resident = None

    def _move(self, member: Resident, *, to_device: bool) -> None:
        if self.device.type == "cpu":
            return
        for tensor in _tensors(member):
            if to_device:
                tensor.data = tensor.data.to(self.device, non_blocking=True)
            elif tensor.device.type != "cpu":
                host = member.host_copies.get(id(tensor))
                if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    member.host_copies[id(tensor)] = host
                host.copy_(tensor.data, non_blocking=True)
                tensor.data = host
        # an offloaded tensor must be complete in host memory before anybody reads or saves it
        torch.cuda.synchronize(self.device)


def _tensors(member: Resident) -> Iterable[Tensor]:
    yield from dict.fromkeys(member.model.parameters())
    yield from dict.fromkeys(member.model.buffers())
    if member.optimizer is not None:
        for group in member.optimizer.param_groups:
            # step counters of torch's optimizers belong on the host, those of fused and captured steps with the rest
            has_counters_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                states = member.optimizer.state.get(parameter, {}).values()
                yield from (v for v in states if isinstance(v, Tensor) and (v.dim() > 0 or has_counters_there))
