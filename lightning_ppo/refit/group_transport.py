"""Weights through a process group of the trainer and each server: gloo on any host, NCCL between GPUs."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.process_group import broadcast, join_group, open_store
from lightning_ppo.refit.transport import Lanes, Receiver, remaining, run_together


class GroupTransport:
    """One group per server, so that a server that dies takes no other's group with it.

    A server joins before its first bucket. After a failure its group is forgotten, and it joins a new one the next
    time; so does a server that was restarted, which is another receiver.
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"], host: str, timeout_s: float, device: torch.device | None = None
    ) -> None:
        """Nothing is opened yet.

        Args:
            backend: `gloo` or `nccl`.
            host: Address of this machine as the servers see it.
            timeout_s: Deadline of joining, and of every broadcast.
            device: CUDA device of the trainer that NCCL sends from; None means the current one.

        Raises:
            EngineError: the trainer lacks what NCCL needs.
        """
        if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise EngineError("transport=nccl needs CUDA and a torch with NCCL in the trainer; set vllm.transport=gloo")
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._device = device
        # a restarted server is another receiver; the group of the old one goes with it
        self._groups: weakref.WeakKeyDictionary[Receiver, tuple[Any, Any]] = weakref.WeakKeyDictionary()

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        with Lanes(receivers) as lanes:
            lanes.submit(lambda receiver: self._join(receiver, deadline))
            for bucket in buckets:
                message = {"kind": "group", **bucket.to_message()}
                lanes.submit(self._broadcasting(message, self._on_device(weights.flat(bucket)), deadline))
        for receiver in receivers:
            if receiver.name in lanes.failures:
                self._groups.pop(receiver, None)
        return lanes.failures

    def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    def _join(self, receiver: Receiver, deadline: float) -> None:
        if receiver in self._groups:
            return
        limit = min(self._timeout_s, remaining(deadline))
        world_size = 1 + receiver.world_size(limit)
        store = open_store(self._host, 0, world_size, limit, is_master=True)
        message = {
            "backend": self._backend,
            "host": self._host,
            "port": store.port,
            "world_size": world_size,
            "timeout_s": self._timeout_s,
        }
        joined: list[Any] = []

        def join() -> None:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            joined.append(join_group(self._backend, store, self._host, store.port, 0, world_size, self._timeout_s))

        run_together(lambda: receiver.connect(message, limit), join)
        self._groups[receiver] = joined[0], store

    def _broadcasting(self, message: dict[str, Any], flat: Tensor, deadline: float) -> Callable[[Receiver], None]:
        def send(receiver: Receiver) -> None:
            group = self._groups[receiver][0]
            run_together(lambda: receiver.update(message, remaining(deadline)), lambda: broadcast(group, flat))

        return send

    def _on_device(self, flat: Tensor) -> Tensor:
        if self._backend == "gloo":
            return flat
        return flat.to(self._device or torch.device("cuda"))
