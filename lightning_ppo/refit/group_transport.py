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
from lightning_ppo.refit.process_group import Group, open_store
from lightning_ppo.refit.staging import Staging
from lightning_ppo.refit.transport import Lanes, Receiver, remaining, run_together


class GroupTransport:
    """One group per server, so that a server that dies takes no other's group with it.

    A server joins before its first bucket. After a failure its group is given up, and it joins a new one the next
    time; so does a server that was restarted, which is another receiver.

    For NCCL a bucket is copied to the trainer's device while the servers get the one before it: two are there at most.
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"], host: str, timeout_s: float, device: torch.device | None = None
    ) -> None:
        """Nothing is opened yet.

        Args:
            backend: `gloo` or `nccl`.
            host: Address of this machine as the servers see it.
            timeout_s: Deadline of joining, and of every broadcast.
            device: CUDA device of the trainer that NCCL sends from.

        Raises:
            EngineError: the trainer lacks what NCCL needs.
        """
        is_possible = dist.is_nccl_available() and torch.cuda.is_available() and device is not None
        if backend == "nccl" and not is_possible:
            raise EngineError("transport=nccl needs CUDA and a torch with NCCL in the trainer; set vllm.transport=gloo")
        self._backend: Literal["gloo", "nccl"] = backend
        self._host = host
        self._timeout_s = timeout_s
        self._device = device
        self._staging = Staging(device) if backend == "nccl" and device is not None else None
        # a restarted server is another receiver; the group of the old one goes with it
        self._groups: weakref.WeakKeyDictionary[Receiver, Group] = weakref.WeakKeyDictionary()

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        with Lanes(receivers) as lanes:
            lanes.submit(lambda receiver: self._join(receiver, deadline))
            for bucket in buckets:
                message = {"kind": "group", **bucket.to_message()}
                if self._staging is not None:
                    lanes.settle(1)
                lanes.submit(self._broadcasting(message, self._staged(weights.flat(bucket)), deadline))
        for receiver in receivers:
            if receiver.name in lanes.failures:
                self._groups.pop(receiver, None)
        return lanes.failures

    def close(self) -> None:
        """Leave all groups."""
        for group in list(self._groups.values()):
            group.abort()
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
        joined: list[Group] = []

        def join() -> None:
            host, port, timeout_s = self._host, store.port, self._timeout_s
            joined.append(Group(self._backend, store, host, port, 0, world_size, timeout_s, self._device))

        try:
            run_together(lambda: receiver.connect(message, limit), join, deadline)
        except BaseException:
            for group in joined:
                group.abort()
            raise
        self._groups[receiver] = joined[0]
        if self._staging is not None:
            # torch would do it where the group is dropped, and hold up the whole process meanwhile
            weakref.finalize(receiver, joined[0].abort).atexit = False

    def _broadcasting(self, message: dict[str, Any], flat: Tensor, deadline: float) -> Callable[[Receiver], None]:
        def send(receiver: Receiver) -> None:
            group = self._groups[receiver]
            try:
                run_together(
                    lambda: receiver.update(message, remaining(deadline)),
                    lambda: group.broadcast(flat, remaining(deadline)),
                    deadline,
                )
            except BaseException:
                group.abort()
                raise

        return send

    def _staged(self, flat: Tensor) -> Tensor:
        if self._staging is None:
            return flat
        target = self._staging.reserve(flat.numel())
        self._staging.write(flat, target)
        return target
