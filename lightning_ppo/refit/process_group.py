"""A process group of one trainer and the workers of one server, beside whatever default group either side has."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ppo.errors import EngineError

# torch does not declare that it exports what is used here
_c10d: Any = dist

PIECE_BYTES = 1 << 29
"""Largest number of bytes in one broadcast; counts beyond 32 bits are not safe with every library."""


def open_store(host: str, port: int, world_size: int, timeout_s: float, *, is_master: bool) -> Any:
    """Open the store through which the members find each other; port 0 lets the master choose.

    Raises:
        EngineError: the port is taken, or the master cannot be reached in time.
    """
    try:
        return _c10d.TCPStore(
            host, port, world_size, is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise EngineError(
            f"group_host={host} port {port} cannot be used ({why}); set vllm.group_host to this machine's address"
            " as the servers see it"
        ) from None


def join_group(backend: str, store: Any, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    """Join the group; blocks until all members have.

    Args:
        backend: `gloo` or `nccl`.
        store: What `open_store` returned.
        host: Address of the trainer; the way there decides which of this machine's addresses gloo listens on.
        port: Port of the store.
        rank: 0 is the trainer.
        world_size: One plus the server's workers.
        timeout_s: Deadline of this call and of every broadcast.

    Raises:
        EngineError: not all members came in time.
    """
    limit = timedelta(seconds=timeout_s)
    prefixed = _c10d.PrefixStore("lightning_ppo", store)
    try:
        if backend == "nccl":
            nccl = _c10d.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = limit
            return nccl(prefixed, rank, world_size, options)
        gloo = _c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_own_address(host, port))]
        options._timeout = limit
        options._threads = 2
        return gloo(prefixed, rank, world_size, options)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise EngineError(
            f"transport={backend} group of {world_size} did not come together in {timeout_s:.0f} s ({why});"
            " check vllm.group_host"
        ) from None


def broadcast(group: Any, flat: Tensor) -> None:
    """Send (rank 0) or receive `flat`, `[N]` uint8; blocks until it is done on this side.

    Raises:
        EngineError: another member is gone, or the deadline passed.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    try:
        for begin in range(0, flat.numel(), PIECE_BYTES):
            group.broadcast([flat[begin : begin + PIECE_BYTES]], options).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise EngineError(f"broadcast={flat.numel()} bytes did not get through ({why}); look at the other side") from (
            None
        )


def _own_address(host: str, port: int) -> str:
    # Connecting a datagram socket sends nothing; it only asks the routing table.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))
        return str(probe.getsockname()[0])
