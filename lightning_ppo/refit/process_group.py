"""A process group of one trainer and the workers of one server, beside whatever default group either side has."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ppo.environment import set_variables
from lightning_ppo.errors import EngineError

_log = logging.getLogger(__name__)

# torch does not declare that it exports what is used here
_c10d: Any = dist
_cuda: Any = torch.cuda

PIECE_BYTES = 1 << 29
"""Largest number of bytes in one broadcast; counts beyond 32 bits are not safe with every library."""

_POLL_S = 0.001
_NCCL_SETTINGS = {
    # By default a lost peer ends this process, at once or after minutes, through threads of torch's own.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment = threading.Lock()


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


class Group:
    """One member of a group. `abort` may be called while another thread waits in `broadcast`."""

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        store: Any,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        """Join it. With gloo this blocks until all members have; with NCCL the first broadcast does.

        Args:
            backend: `gloo` or `nccl`.
            store: What `open_store` returned.
            host: Address of the trainer; the way there decides which of this machine's addresses gloo listens on.
            port: Port of the store.
            rank: 0 is the trainer.
            world_size: One plus the server's workers.
            timeout_s: Deadline of this call and, with gloo, of every broadcast.
            device: CUDA device of this member, which NCCL needs.

        Raises:
            EngineError: not all members came in time.
        """
        self._rank = rank
        self._store = _c10d.PrefixStore("lightning_ppo", store)
        self._stream: Any = None
        self._is_aborted = False
        limit = timedelta(seconds=timeout_s)
        try:
            if backend == "nccl":
                # NCCL waits for all that is queued on the current stream, and whoever waits for it does so there
                self._stream = _cuda.Stream(device)
                self._group = _join_nccl(self._store, rank, world_size, limit)
            else:
                self._group = _join_gloo(self._store, rank, world_size, limit, _own_address(host, port))
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise EngineError(
                f"transport={backend} group of {world_size} did not come together in {timeout_s:.0f} s ({why});"
                " check vllm.group_host"
            ) from None

    def broadcast(self, flat: Tensor, timeout_s: float) -> None:
        """Send (rank 0) or receive `flat`, `[N]` uint8; blocks until it is done on this side.

        What is received may be used on the current stream at once.

        Args:
            flat: On the host for gloo, on the member's device for NCCL; what is sent has been written completely.
            timeout_s: Deadline, for NCCL.

        Raises:
            EngineError: another member is gone, or the deadline passed. The group is of no use any more: abort it.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        pieces = [flat[begin : begin + PIECE_BYTES] for begin in range(0, flat.numel(), PIECE_BYTES)]
        try:
            if self._stream is None:
                for piece in pieces:
                    self._group.broadcast([piece], options).wait()
            elif pieces:
                self._broadcast_nccl(pieces, options, timeout_s)
        except TimeoutError:
            raise EngineError(
                f"broadcast={flat.numel()} bytes did not get through in {timeout_s:.0f} s; look at the other side, or"
                " raise vllm.update_timeout_s"
            ) from None
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise EngineError(
                f"broadcast={flat.numel()} bytes did not get through ({why}); look at the other side"
            ) from None

    def abort(self) -> None:
        """Give the group up, so that nothing on this side's device waits for a member that is gone; returns at once.

        A broadcast through gloo ends by itself, at its deadline.
        """
        if self._stream is None or self._is_aborted:
            return
        self._is_aborted = True
        # It may take as long as the group's deadline, and nothing depends on its end.
        threading.Thread(target=self._abort, name="refit-abort", daemon=True).start()

    def _broadcast_nccl(self, pieces: list[Tensor], options: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        is_receiver = self._rank != 0
        if is_receiver:
            # the memory may still be in use there for what it was before
            self._stream.wait_stream(_cuda.current_stream(self._stream.device))
        with _cuda.stream(self._stream):
            works = [self._group.broadcast([piece], options) for piece in pieces]
            for work in works:
                # not `wait`, which returns at once, and leaves the stream to wait without a deadline
                while not work.is_completed():
                    if self._is_aborted:
                        raise RuntimeError("the group is given up")
                    if time.monotonic() >= deadline:
                        raise TimeoutError
                    time.sleep(_POLL_S)
                # Completed is also what has failed: given a deadline, this says so. It has nothing to wait for.
                work.wait(timedelta(seconds=1))
        if is_receiver:
            _cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            _log.warning("a group for weights could not be given up: %s", str(error).splitlines()[0])


def _join_nccl(store: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    nccl = _c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    with _nccl_settings():
        return nccl(store, rank, world_size, options)


def _join_gloo(store: Any, rank: int, world_size: int, limit: timedelta, address: str) -> Any:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    options._threads = 2
    return gloo(store, rank, world_size, options)


@contextmanager
def _nccl_settings() -> Iterator[None]:
    # Read when a group is made; the groups of training, in this process too, keep their own.
    with _environment:
        before = set_variables(_NCCL_SETTINGS)
        try:
            yield
        finally:
            set_variables(before)


def _own_address(host: str, port: int) -> str:
    # Connecting a datagram socket sends nothing; it only asks the routing table.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))
        return str(probe.getsockname()[0])
