"""The few collectives that the PPO step needs; the identity on one process."""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

HEARTBEAT_S = 1.0
"""How often waiting ranks hear from rank 0: far below any timeout of a process group."""


@dataclass(frozen=True)
class Ranks:
    """Data-parallel ranks."""

    rank: int
    world_size: int
    sum_: Callable[[Tensor], None]
    """Sums a tensor over all ranks, in place."""

    @classmethod
    def single(cls) -> "Ranks":
        """One process alone."""
        return cls(rank=0, world_size=1, sum_=lambda _: None)

    def stack(self, local: Tensor) -> Tensor:
        """Collect every rank's tensor of the same shape into `[world_size, ...]`, on every rank."""
        stacked = torch.zeros((self.world_size, *local.shape), dtype=local.dtype, device=local.device)
        stacked[self.rank] = local
        self.sum_(stacked)
        return stacked

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank. A collective."""
        total = torch.tensor(float(flag))
        self.sum_(total)
        return bool(total)


@dataclass(frozen=True)
class _Message:
    """What rank 0 tells the others."""

    result: Any = None
    error: BaseException | None = None
    is_heartbeat: bool = False


@dataclass(frozen=True)
class Relay:
    """Work that rank 0 does while the others wait: its result, its error and a stop reach every rank.

    Args:
        ranks: All ranks.
        broadcast: Sends rank 0's object to every rank.
        is_stopped: Whether this process was asked to stop (SIGTERM).
        stop: What every rank raises once any of them was asked to.
    """

    ranks: Ranks
    broadcast: Callable[[Any], Any]
    is_stopped: Callable[[], bool]
    stop: Callable[[], BaseException]

    def run(self, work: Callable[[Callable[[], None]], T]) -> T:
        """Do the work on rank 0 and return its result on every rank. A collective.

        Args:
            work: Called on rank 0 only. It must call its argument at least every second while it waits, which keeps
                the other ranks from timing out, and raises when the run has to stop.

        Raises:
            BaseException: whatever `work` raised, on every rank; or `stop()`, on every rank.
        """
        if self.ranks.world_size == 1:
            return work(self._poll_alone)
        self._stop_together()
        return self._lead(work) if self.ranks.rank == 0 else self._follow()

    def _lead(self, work: Callable[[Callable[[], None]], T]) -> T:
        beat_s = time.monotonic()
        others_listen = True

        def poll() -> None:
            nonlocal beat_s, others_listen
            self._poll_alone()
            if time.monotonic() - beat_s >= HEARTBEAT_S:
                # what is raised in here, others raise as well, or are gone
                others_listen = False
                self.broadcast(_Message(is_heartbeat=True))
                self._stop_together()
                others_listen = True
                beat_s = time.monotonic()

        try:
            result = work(poll)
        except BaseException as error:
            if others_listen:
                self.broadcast(_Message(error=_portable(error)))
            raise
        self.broadcast(_Message(result=result))
        return result

    def _follow(self) -> Any:
        while (message := self.broadcast(None)).is_heartbeat:
            self._stop_together()
        if message.error is not None:
            raise message.error
        return message.result

    def _poll_alone(self) -> None:
        if self.is_stopped():
            raise self.stop()

    def _stop_together(self) -> None:
        # one rank must never leave alone: the others would wait for it in their next collective
        if self.ranks.any(self.is_stopped()):
            raise self.stop()


def _portable(error: BaseException) -> BaseException:
    """Return the error, or its text if other processes could not rebuild it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may raise anything when it is rebuilt
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
