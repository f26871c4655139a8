"""What keeps a refit of all servers and the weights of a restarted one apart."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ppo.errors import EngineError

_CLOSE_CHECK_S = 0.25


class UpdateGate:
    """A lock, and the policy version that servers must have to serve.

    Its holder may take the roster's lock; nobody takes the gate while holding that one. A holder waits for nothing but
    answers of servers, each with a deadline: above all not for requests that wait for a server.

    Attributes:
        version: The current policy version; None before the first weights. Written by the holder.
        awake: Clear while the engine sleeps: no server is started then, and none is let in. Cleared by the holder.
    """

    def __init__(self) -> None:
        """No weights yet."""
        self.version: int | None = None
        self.awake = threading.Event()
        self.awake.set()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, limit_s: float) -> Iterator[None]:
        """Hold the gate.

        Raises:
            EngineError: it was not free within `limit_s`.
        """
        if not self._lock.acquire(timeout=limit_s):
            raise EngineError(
                f"vllm.update_timeout_s={limit_s:g} ran out before a restarted server had its weights; raise it"
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def hold_unless(self, closing: threading.Event) -> Iterator[bool]:
        """Hold the gate, however long it takes; yields False, without the gate, once `closing` is set."""
        while not (held := self._lock.acquire(timeout=_CLOSE_CHECK_S)):
            if closing.is_set():
                break
        try:
            yield held
        finally:
            if held:
                self._lock.release()
