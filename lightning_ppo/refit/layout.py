"""Many named tensors in one flat buffer: where each one lies. Both sides of a weight transfer use the same layout."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError

ALIGNMENT = 64
"""Bytes; one cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies in the buffer."""

    name: str
    dtype: str
    """Name of the dtype in torch, for example `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself.

        Raises:
            EngineError: torch has no dtype of this name.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise EngineError(f"dtype={self.dtype} of weight {self.name} is unknown; send a torch dtype")
        return dtype

    @property
    def num_bytes(self) -> int:
        """Bytes the tensor takes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class FlatLayout:
    """All tensors of one policy, back to back and aligned."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int

    def __post_init__(self) -> None:
        """Check that every tensor lies inside the buffer and none overlaps another.

        Raises:
            EngineError: a name comes twice, or a tensor is misplaced.
        """
        end, names = 0, set()
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            if slot.name in names:
                raise EngineError(f"weights={slot.name} comes twice; send every tensor once")
            names.add(slot.name)
            last = slot.offset + slot.num_bytes
            if slot.offset < end or slot.offset % ALIGNMENT or min(slot.shape, default=0) < 0 or last > self.num_bytes:
                raise EngineError(
                    f"layout={slot.name} at bytes {slot.offset} to {last} does not fit {self.num_bytes} bytes in order;"
                    " build the layout with FlatLayout.of"
                )
            end = last

    @classmethod
    def of(cls, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Self:
        """Lay these tensors out in the order they come; their values are not touched.

        Args:
            weights: Names and tensors.
            dtype: What floating-point tensors become; None leaves every dtype as it is.

        Raises:
            EngineError: a name comes twice.
        """
        slots, end = [], 0
        for name, tensor in weights:
            kept = dtype is None or not tensor.is_floating_point()
            kind = tensor.dtype if kept else dtype
            slot = TensorSlot(name, str(kind).removeprefix("torch."), tuple(tensor.shape), end)
            slots.append(slot)
            end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(slots), end)

    def views(self, buffer: Any) -> dict[str, Tensor]:
        """Tensors that share memory with `buffer`.

        Args:
            buffer: A writable object with the buffer protocol, at least `num_bytes` long.

        Raises:
            EngineError: the buffer is too short.
        """
        if len(buffer) < self.num_bytes:
            raise EngineError(
                f"buffer={len(buffer)} bytes is shorter than its layout; {self.num_bytes} bytes are needed"
            )
        views = {}
        for slot in self.slots:
            count = math.prod(slot.shape)
            if count == 0:
                views[slot.name] = torch.empty(slot.shape, dtype=slot.torch_dtype)
                continue
            flat = torch.frombuffer(buffer, dtype=slot.torch_dtype, count=count, offset=slot.offset)
            views[slot.name] = flat.view(slot.shape)
        return views


def write_weights(views: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into the views of a layout; non-contiguous ones and ones on other devices are fine.

    Args:
        views: What `FlatLayout.views` returned.
        weights: Exactly the layout's names, in any order.

    Raises:
        EngineError: a tensor is missing, unknown, doubled, or of another shape or dtype than in the layout.
    """
    missing = set(views)
    for name, tensor in weights:
        if name not in missing:
            why = "comes twice" if name in views else "was not among the first weights"
            raise EngineError(f"weights={name} {why}; send the same tensors in every update")
        view = views[name]
        if view.shape != tensor.shape or view.dtype != tensor.dtype:
            raise EngineError(
                f"weights={name} is {_kind(tensor)} but was {_kind(view)};"
                " send the same shapes and dtypes in every update"
            )
        view.copy_(tensor.detach())
        missing.discard(name)
    if missing:
        raise EngineError(f"weights={min(missing)} is missing; send the same tensors in every update")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
