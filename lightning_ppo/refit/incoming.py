"""The server's end of a weight transfer: messages in, named tensors out. Knows torch, but not vLLM."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.cuda_handles import device_uuid, open_shared
from lightning_ppo.refit.process_group import Group, open_store

Named = list[tuple[str, Tensor]]

ABANDON = {"kind": "abandon"}
"""Ends an update that cannot be completed: vLLM forgets an update in which a bucket failed, and has no other way."""


class Incoming:
    """Receives buckets in one worker of a server, whichever way they are sent."""

    def __init__(self, device: torch.device, worker: int) -> None:
        """Nothing is opened yet.

        Args:
            device: Device of the worker.
            worker: Number of the worker among those of the server, from 0.
        """
        self._device = device
        self._worker = worker
        self._group: tuple[Group, torch.device, float] | None = None
        self._map: tuple[tuple[int, ...], mmap.mmap] | None = None
        self._opened: tuple[list[Any], Tensor] | None = None

    def connect(self, message: Mapping[str, Any]) -> None:
        """Join the process group that the message names.

        Raises:
            EngineError: the group did not come together.
        """
        self.close()
        host, port, world_size = str(message["host"]), int(message["port"]), int(message["world_size"])
        timeout_s = float(message["timeout_s"])
        backend: Literal["gloo", "nccl"] = "nccl" if message["backend"] == "nccl" else "gloo"
        if backend == "nccl":
            if self._device.type != "cuda":
                raise EngineError(f"transport=nccl needs CUDA, this server runs on {self._device.type}; set gloo")
            torch.cuda.set_device(self._device)
        store = open_store(host, port, world_size, timeout_s, is_master=False)
        rank = 1 + self._worker
        group = Group(backend, store, host, port, rank, world_size, timeout_s, self._device)
        self._group = group, self._device if backend == "nccl" else torch.device("cpu"), timeout_s

    def receive(self, message: dict[str, Any]) -> Named:
        """Get the tensors of one bucket, in the order they were laid out.

        The tensors of shared memory and CUDA IPC are the sender's own memory: copy them before the update ends.

        Raises:
            EngineError: they did not arrive, or the message is not understood.
        """
        kind = message.get("kind")
        if kind == ABANDON["kind"]:
            raise EngineError("this update is given up by the trainer")
        if kind == "file":
            return self._from_file(Path(message["path"]))
        bucket = Bucket.from_message(message)
        if kind == "shared_memory":
            return self._from_shared_memory(bucket, message)
        if kind == "group":
            return self._from_group(bucket)
        if kind == "ipc":
            return self._from_ipc(bucket, message)
        raise EngineError(f"transport={kind} is unknown to this server; both sides need the same version")

    def close(self) -> None:
        """Leave the group and unmap what was mapped; safe to call twice."""
        if self._group is not None:
            self._group[0].abort()
        self._group = None
        self._opened = None
        # Tensors that somebody still holds keep the mapping alive; it goes with the last one.
        self._map = None

    def _from_file(self, path: Path) -> Named:
        try:
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineError(
                f"transfer_folder={path.parent} has no readable {path.name} ({why}); let all hosts see the same folder"
            ) from None
        return list(tensors.items())

    def _from_shared_memory(self, bucket: Bucket, message: dict[str, Any]) -> Named:
        if bucket.num_bytes == 0:
            return list(bucket.layout().views(b"").items())
        mapped = self._mapping(int(message["pid"]), int(message["fd"]), int(message["device"]), int(message["inode"]))
        if len(mapped) < bucket.end:
            raise EngineError(f"shared memory={len(mapped)} bytes is too short; the bucket ends at {bucket.end}")
        whole = torch.frombuffer(mapped, dtype=torch.uint8, count=bucket.num_bytes, offset=bucket.begin)
        return _views(bucket, whole)

    def _mapping(self, pid: int, fd: int, device: int, inode: int) -> mmap.mmap:
        key = (pid, fd, device, inode)
        if self._map is not None and self._map[0] == key:
            return self._map[1]
        path = f"/proc/{pid}/fd/{fd}"
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != (device, inode):
                    raise EngineError(
                        f"transport=shared_memory found another file at {path}: trainer and server do not share"
                        " processes; set vllm.transport=file or gloo"
                    )
                # A private mapping is writable for torch, but nothing written to it reaches the trainer.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise EngineError(
                f"transport=shared_memory cannot open {path} ({error.strerror}): trainer and server must run on one"
                " host, in one process namespace, as one user; set vllm.transport=file or gloo"
            ) from None
        self._map = key, mapped
        return mapped

    def _from_group(self, bucket: Bucket) -> Named:
        if self._group is None:
            raise EngineError("transport=group has no group yet; init_weight_transfer_engine comes first")
        group, device, timeout_s = self._group
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        try:
            group.broadcast(flat, timeout_s)
        except EngineError:
            # what is left of it would keep the device busy for ever
            self.close()
            raise
        return _views(bucket, flat)

    def _from_ipc(self, bucket: Bucket, message: dict[str, Any]) -> Named:
        if self._device.type != "cuda":
            raise EngineError(f"transport=ipc needs CUDA, this server runs on {self._device.type}; set another one")
        uuid = device_uuid(self._device)
        handle = message["handles"].get(uuid)
        if handle is None:
            raise EngineError(f"transport=ipc has no memory on device {uuid}; let trainer and server share devices")
        if self._opened is None or self._opened[0] != handle:
            self._opened = handle, open_shared(handle, self._device)
        # The sender uses its memory again for the next bucket, and vLLM keeps tensors until their layer is complete.
        copied = self._opened[1][: bucket.num_bytes].clone()
        # the sender may do so as soon as this is answered
        torch.cuda.current_stream(self._device).synchronize()
        return _views(bucket, copied)


def _views(bucket: Bucket, flat: Tensor) -> Named:
    named: Named = []
    for slot in bucket.layout().slots:
        part = flat[slot.offset : slot.offset + slot.num_bytes]
        named.append((slot.name, part.view(slot.torch_dtype).view(slot.shape)))
    return named
