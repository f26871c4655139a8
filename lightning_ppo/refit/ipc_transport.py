"""Weights through CUDA memory that trainer and server share: both on the same device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.cuda_handles import device_uuid, share
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.transport import Lanes, Receiver, remaining


class IPCTransport:
    """One staging buffer per device, which servers open by its CUDA IPC handle and copy from.

    Handles travel as numbers and base64 text. One bucket is on its way at a time: the buffer is used again for
    the next.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Nothing is allocated yet.

        Args:
            devices: CUDA devices of the trainer that servers run on too.

        Raises:
            EngineError: there is none, or one is no CUDA device.
        """
        wrong = [str(device) for device in devices if device.type != "cuda"]
        if wrong or not devices:
            raise EngineError(f"transport=ipc needs CUDA devices, not {wrong or 'none'}; set another vllm.transport")
        self._devices = tuple(devices)

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        failures: dict[str, EngineError] = {}
        size = max((bucket.num_bytes for bucket in weights.buckets), default=0)
        buffers = [torch.empty(max(size, 1), dtype=torch.uint8, device=device) for device in self._devices]
        for bucket in buckets:
            for buffer in buffers:
                buffer[: bucket.num_bytes].copy_(weights.flat(bucket))
                torch.cuda.current_stream(buffer.device).synchronize()
            left = [receiver for receiver in receivers if receiver.name not in failures]
            # torch counts who has opened a handle, so that every receiver needs one of its own
            messages = {receiver.name: self._message(bucket, buffers) for receiver in left}
            with Lanes(left) as lanes:
                lanes.submit(_loading(messages, deadline))
            failures.update(lanes.failures)
        return failures

    def close(self) -> None:
        """There is nothing to leave behind."""

    def _message(self, bucket: Bucket, buffers: Sequence[Tensor]) -> dict[str, Any]:
        handles = {device_uuid(buffer.device): share(buffer) for buffer in buffers}
        return {"kind": "ipc", "handles": handles, **bucket.to_message()}


def _loading(messages: Mapping[str, dict[str, Any]], deadline: float) -> Callable[[Receiver], None]:
    def load(receiver: Receiver) -> None:
        receiver.update(messages[receiver.name], remaining(deadline))

    return load
