"""One server and its actor, as the actor's own process sees them. Ray runs this class on the server's node."""

import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.vllm.launch import Command, start_process
from lightning_ppo.rollout.vllm.process import ServerProcess

_POLL_S = 0.1
_TAIL_LINES = 50


@dataclass(frozen=True)
class HostedServer:
    """What is to run.

    Attributes:
        index: Number of the server.
        name: What messages call it.
        command: How it is started, a pickled `Command`; called in the actor, whose environment it finds.
        cores: CPU cores of the node that it is pinned to.
        log_path: Its log, on the node; None keeps it in a temporary file without a name.
        hides_gpus: Whether it must not see the node's GPUs. Ray hides none from an actor that reserves none.
    """

    index: int
    name: str
    command: bytes
    cores: tuple[int, ...]
    log_path: Path | None
    hides_gpus: bool


@dataclass(frozen=True)
class Started:
    """Where the server will answer, and the actor's process id; `problem` says why it could not be started."""

    url: str
    actor_pid: int
    problem: str | None


@dataclass(frozen=True)
class End:
    """How a server ended; see `lightning_ppo.rollout.vllm.process.ServerProcess`."""

    port_taken: bool
    description: str
    tail: tuple[str, ...]


class ServerHost:
    """Starts the server when it is made. Its methods run in several threads at once.

    When this process ends, however that happens, the server's guard ends the server.
    """

    def __init__(self, what: HostedServer) -> None:
        """Start the server and return at once."""
        import ray

        self._server: ServerProcess | None = None
        self._problem: str | None = None
        if what.hides_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        util: Any = ray.util
        host = util.get_node_ip_address()
        try:
            command: Command = pickle.loads(what.command)
            self._server = start_process(what.name, what.index, command, host, what.cores, what.log_path)
        except Exception as error:
            # An error out of here would reach the trainer as a page of Ray's text.
            self._problem = f"could not be started on node {host}: {type(error).__name__}: {error}"

    def started(self) -> Started:
        """Tell that the actor runs."""
        return Started("" if self._server is None else self._server.url, os.getpid(), self._problem)

    def pid(self) -> int:
        """Process id of the server.

        Raises:
            EngineError: it was never started.
        """
        if self._server is None:
            raise EngineError(str(self._problem))
        return self._server.pid

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of its log."""
        return [] if self._server is None else self._server.log_tail(lines)

    def describe(self) -> str:
        """One line: how the server is, or how it ended."""
        return str(self._problem) if self._server is None else self._server.describe_end()

    def wait_end(self) -> End:
        """Return when the server has ended, and nothing is left of it."""
        if self._server is None:
            return End(False, str(self._problem), ())
        while self._server.is_alive():
            time.sleep(_POLL_S)
        # If it was the guard that was killed, the server may linger: it waits for requests that nobody works on.
        self._server.stop(kill=True)
        tail = tuple(self._server.log_tail(_TAIL_LINES))
        return End(self._server.port_taken(), self._server.describe_end(), tail)

    def stop(self, kill: bool) -> None:
        """End the server and everything it started."""
        if self._server is not None:
            self._server.stop(kill=kill)
