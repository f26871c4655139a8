"""Who starts servers: the interface, and plain subprocesses on this machine."""

import contextlib
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.port import ReservedPort
from lightning_ppo.rollout.vllm.process import ServerProcess
from lightning_ppo.rollout.vllm.server_folder import make_server_folder
from lightning_ppo.validation import require

_HOST = "127.0.0.1"


class Server(Protocol):
    """A server that we own. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def url(self) -> str:
        """Where it answers, or will."""
        ...

    def is_alive(self) -> bool:
        """Whether it runs; returns at once, for it is asked several times a second."""
        ...

    def port_taken(self) -> bool:
        """Whether it ended because somebody else had its port."""
        ...

    def describe_end(self) -> str:
        """One line: how it ended, why if its log says so, and the last lines of its log."""
        ...

    def stop(self, *, kill: bool = False) -> None:
        """End it, with `kill` without any grace; returns within seconds, and may be called again."""
        ...

    def close(self) -> None:
        """Stop it and let go of everything; nothing but `is_alive` and `close` may be called afterwards."""
        ...


class Launcher(Protocol):
    """Starts servers. Every method may be called from any thread."""

    def launch(self, index: int) -> Server:
        """Start server number `index` and return at once; a server of this number that was started before has ended.

        Raises:
            EngineError: it cannot be started.
        """
        ...

    def close(self) -> None:
        """Close every server that was started here; may be called again."""
        ...


class Command(Protocol):
    """How a server is started."""

    def __call__(self, index: int, host: str, port: int, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command and the whole environment of server number `index`, which may keep files in `folder`."""
        ...


class SubprocessLauncher:
    """Starts servers as processes of this machine; see `Launcher`."""

    def __init__(self, config: VLLMConfig, command: Command, log_folder: Path | None = None) -> None:
        """Nothing is started yet.

        Args:
            config: `num_servers`, `cores`.
            command: How a server is started.
            log_folder: Folder for `server_0.log` and so on; None keeps the logs in temporary files without names.

        Raises:
            ConfigError: this machine lacks one of `config.cores`, or cannot pin processes.
        """
        check_cores(config.cores)
        self._config = config
        self._command = command
        self._log_folder = log_folder
        self._lock = threading.Lock()
        self._servers: list[ServerProcess] = []
        self._closed = False

    def launch(self, index: int) -> ServerProcess:
        """Start server number `index` and return at once.

        Raises:
            EngineError: the launcher is closed, or the process cannot be started.
        """
        name = f"server_{index}"
        with self._lock:
            if self._closed:
                raise EngineError(f"vLLM {name} cannot start: its launcher is closed")
            try:
                server = start_process(
                    name,
                    index,
                    self._command,
                    _HOST,
                    deal_cores(self._config.cores, self._config.num_servers, index),
                    None if self._log_folder is None else self._log_folder / f"{name}.log",
                )
            except OSError as error:
                raise EngineError(f"vLLM {name} cannot start: {error}") from error
            self._servers.append(server)
            return server

    def close(self) -> None:
        """Close every server that was started here, all at the same time; may be called again."""
        with self._lock:
            self._closed = True
            servers, self._servers = self._servers, []
        close_all(servers)


def start_process(
    name: str, index: int, command: Command, host: str, cores: Sequence[int], log_path: Path | None
) -> ServerProcess:
    """Start a server on this machine, with a port and a folder of its own, which go with it; see `ServerProcess`.

    Raises:
        OSError: there is no port or no folder for it, its log cannot be opened, or no process can be started.
    """
    with contextlib.ExitStack() as undo:
        port = ReservedPort(host)
        undo.callback(port.release)
        folder = make_server_folder()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        argv, env = command(index, host, port.number, folder)
        server = ServerProcess(name, argv, env, port=port, host=host, cores=cores, log_path=log_path, folder=folder)
        undo.pop_all()
    return server


def close_all(servers: Sequence[Server]) -> None:
    """Close servers, all at the same time."""
    threads = [threading.Thread(target=server.close, name=f"close-{server.name}") for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def deal_cores(cores: Sequence[int], num_servers: int, index: int) -> tuple[int, ...]:
    """The cores of one server: equal shares in order; with fewer cores than servers, one core each in turn."""
    if len(cores) < num_servers:
        return (cores[index % len(cores)],) if cores else ()
    return tuple(cores[index * len(cores) // num_servers : (index + 1) * len(cores) // num_servers])


def check_cores(cores: Sequence[int]) -> None:
    """Raise `ConfigError` unless processes can be pinned to these cores."""
    if not cores:
        return
    require(hasattr(os, "sched_setaffinity"), "vllm.cores", tuple(cores), "needs Linux", "leave it empty")
    count = os.cpu_count() or 1
    missing = [core for core in cores if core >= count]
    why = f"names cores that this machine of {count} lacks"
    require(not missing, "vllm.cores", tuple(cores), why, f"use 0 to {count - 1}")
