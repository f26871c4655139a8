"""Gradient accumulation over the chunks of a PPO step, in flat buffers of our own.

Autograd's `.grad` would be freed or zeroed by offloading a model, by validation and by anybody's `zero_grad`; these
buffers are not. They hold *sums*; what they are divided by is known only when the step closes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ppo.errors import UpdateInProgressError


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies in a flat buffer."""

    parameter: nn.Parameter
    start: int
    stop: int


class GradientAccumulator:
    """Sums of gradients of one model over micro-batches, chunks and ranks.

    A buffer is float32, or float64 when every parameter is; it stays on the device where gradients are computed,
    whatever is done to the parameters. Several named buffers can be filled, for terms that are combined at the close.

    Args:
        parameters: The parameters of one model; those without `requires_grad` and repeated (tied) ones are skipped.
        reduce: Sums a tensor over all ranks, in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reduce: Callable[[Tensor], None]) -> None:
        self._slots: list[Slot] = []
        size = 0
        for parameter in dict.fromkeys(p for p in parameters if p.requires_grad):
            self._slots.append(Slot(parameter, size, size + parameter.numel()))
            size += parameter.numel()
        self._size = size
        dtypes = {slot.parameter.dtype for slot in self._slots}
        self._dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        self._reduce = reduce
        self._buffers: dict[str, Tensor] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether gradients of an unfinished step are held."""
        return self._is_open

    def begin(self) -> None:
        """Open a step with empty buffers.

        Raises:
            UpdateInProgressError: a step is open already.
        """
        if self._is_open:
            raise UpdateInProgressError("a PPO step is open already; finish or abort it before the next begins")
        for buffer in self._buffers.values():
            buffer.zero_()
        self._is_open = True

    @contextmanager
    def capture(self, buffer: str) -> Iterator[None]:
        """Add the gradients of every backward pass inside to a named buffer.

        Raises:
            UpdateInProgressError: no step is open.
        """
        if not self._is_open:
            raise UpdateInProgressError("no PPO step is open; call begin before the first backward pass")
        flat = self._buffer(buffer)
        for slot in self._slots:
            view = flat[slot.start : slot.stop].view_as(slot.parameter)
            slot.parameter.grad = view if self._adds_in_place(slot.parameter, flat) else None
        try:
            yield
            for slot in self._slots:
                grad, view = slot.parameter.grad, flat[slot.start : slot.stop]
                # autograd may replace a view by the new total instead of adding to it (e.g. with create_graph)
                if grad is not None and grad.data_ptr() != view.data_ptr():
                    update = grad.detach().reshape(-1).to(flat.device, self._dtype)
                    view.copy_(update) if self._adds_in_place(slot.parameter, flat) else view.add_(update)
        finally:
            for slot in self._slots:
                slot.parameter.grad = None

    def is_finite(self) -> bool:
        """Whether every accumulated gradient on this rank is finite."""
        return all(bool(torch.isfinite(buffer.sum())) for buffer in self._buffers.values())

    def close(self, coefficients: Mapping[str, float]) -> Tensor:
        """Sum the buffers over all ranks, combine them, and close the step.

        Args:
            coefficients: Factor of each buffer; buffers that no rank ever filled count as zero.

        Returns:
            The flat gradient `[parameters]`, which stays valid until the next step begins.

        Raises:
            UpdateInProgressError: no step is open.
        """
        if not self._is_open:
            raise UpdateInProgressError("no PPO step is open; begin one before closing it")
        result: Tensor | None = None
        for name, factor in coefficients.items():
            flat = self._buffer(name)
            self._reduce(flat)
            flat.mul_(factor)
            result = flat if result is None else result.add_(flat)
        self._is_open = False
        return result if result is not None else self._buffer("unused")

    def abort(self) -> None:
        """Drop what was accumulated; nothing happens when no step is open."""
        self._is_open = False

    def release(self) -> None:
        """Free the buffers.

        Raises:
            UpdateInProgressError: a step is open, and its gradients would be lost.
        """
        if self._is_open:
            raise UpdateInProgressError("freeing gradient buffers would lose the open PPO step; finish or abort it")
        self._buffers.clear()

    @contextmanager
    def as_grads(self, flat: Tensor) -> Iterator[None]:
        """Let every parameter's `.grad` be its part of a flat gradient while the optimizer steps."""
        try:
            for slot in self._slots:
                parameter = slot.parameter
                grad = flat[slot.start : slot.stop].view_as(parameter).to(parameter.device, parameter.dtype)
                # fused kernels walk through memory and take for granted that strides are the same
                parameter.grad = grad if parameter.is_contiguous() else torch.empty_like(parameter).copy_(grad)
            yield
        finally:
            for slot in self._slots:
                slot.parameter.grad = None

    def _adds_in_place(self, parameter: nn.Parameter, flat: Tensor) -> bool:
        # autograd wants a gradient with the parameter's own strides
        return parameter.dtype == self._dtype and parameter.device == flat.device and parameter.is_contiguous()

    def _buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            device = self._slots[0].parameter.device if self._slots else torch.device("cpu")
            self._buffers[name] = torch.zeros(self._size, dtype=self._dtype, device=device)
        return self._buffers[name]


def clip_to_norm(flat: Tensor, max_norm: float | None) -> float:
    """Scale a flat gradient so that its norm is at most `max_norm`, in place, by the rule of torch's `clip_grad_norm_`.

    Returns:
        The norm before clipping; infinite or NaN gradients are left alone, for the caller to reject.
    """
    norm = float(torch.linalg.vector_norm(flat))
    if max_norm is not None and norm < float("inf"):
        flat.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm
