"""Copies of buckets on a CUDA device of the trainer, from where servers get them."""

from typing import Any

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError

# torch does not type its streams
_cuda: Any = torch.cuda


class Staging:
    """Memory of one device, filled on a stream of its own: beside what training has queued there, not behind it."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated yet.

        Args:
            device: A CUDA device.
        """
        self.device = device
        self._stream = _cuda.Stream(device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Allocate `[num_bytes]` uint8; its last reference gives it back.

        Raises:
            EngineError: the device has no room for it.
        """
        try:
            # memory of this stream, so that nothing queued on another one can still be using it
            with _cuda.stream(self._stream):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            raise EngineError(
                f"bucket={num_bytes} bytes have no room on {self.device}; lower vllm.bucket_bytes, or leave the device"
                " more memory"
            ) from None

    def write(self, flat: Tensor, target: Tensor) -> None:
        """Copy `flat`, on the host, to the begin of `target`; blocks until it is there."""
        with _cuda.stream(self._stream):
            target[: flat.numel()].copy_(flat)
        self._stream.synchronize()
