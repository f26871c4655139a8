"""Weights through CUDA memory that trainer and server share: both on the same device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.cuda_handles import device_uuid, share
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.staging import Staging
from lightning_ppo.refit.transport import Lanes, Receiver, loading


@dataclass(frozen=True)
class _Shared:
    """Memory on one device that servers open."""

    staging: Staging
    buffer: Tensor
    handle: list[Any]

    @classmethod
    def reserve(cls, device: torch.device, num_bytes: int) -> Self:
        staging = Staging(device)
        buffer = staging.reserve(num_bytes)
        return cls(staging, buffer, share(buffer))


class IPCTransport:
    """One buffer per device, which servers open by its CUDA IPC handle and copy from.

    It stays for the whole run, and is exported once: torch keeps what was exported until every export was opened and
    released, and a server that fails does neither. Handles travel as numbers and base64 text. One bucket is on its way
    at a time: the buffer is used again for the next.
    """

    def __init__(self, devices: Sequence[torch.device], bucket_bytes: int) -> None:
        """Nothing is allocated yet.

        Args:
            devices: CUDA devices of the trainer that servers run on too.
            bucket_bytes: Largest number of bytes in a bucket of several tensors.

        Raises:
            EngineError: there is none, or one is no CUDA device.
        """
        wrong = [str(device) for device in devices if device.type != "cuda"]
        if wrong or not devices:
            raise EngineError(f"transport=ipc needs CUDA devices, not {wrong or 'none'}; set another vllm.transport")
        self._devices = tuple(devices)
        self._bucket_bytes = bucket_bytes
        self._shared: dict[str, _Shared] = {}

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        if receivers:
            self._reserve(weights)
        handles = {uuid: shared.handle for uuid, shared in self._shared.items()}
        with Lanes(receivers) as lanes:
            for bucket in buckets:
                lanes.settle(0)
                for shared in self._shared.values():
                    shared.staging.write(weights.flat(bucket), shared.buffer)
                lanes.submit(loading({"kind": "ipc", "handles": handles, **bucket.to_message()}, deadline))
        return lanes.failures

    def close(self) -> None:
        """Give the memory back."""
        self._shared = {}

    def _reserve(self, weights: HostWeights) -> None:
        # neighbours that are complete together travel as one bucket, which is larger than any of `buckets`
        largest = max((bucket.num_bytes for bucket in weights.buckets), default=0)
        size = max(largest, min(self._bucket_bytes, weights.num_bytes), 1)
        if all(shared.buffer.numel() < size for shared in self._shared.values()):
            self._shared = {}
            self._shared = {device_uuid(device): _Shared.reserve(device, size) for device in self._devices}
