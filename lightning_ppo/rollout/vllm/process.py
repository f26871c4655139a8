"""One server as the process that started it sees it: its guard, its log, its end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ppo.errors import EngineDiedError
from lightning_ppo.rollout.vllm import guard
from lightning_ppo.rollout.vllm.port import ReservedPort
from lightning_ppo.rollout.vllm.server_log import ServerLog

_PID_WAIT_S = 20.0
_PID_POLL_S = 0.1
_PATIENCE_S = 7.0
_DESCRIBED_LINES = 3


class ServerProcess:
    """A running server, which ends when this process does, however that ends.

    A guard (`guard.py`) sits between the two. Methods may be called from any thread.

    Attributes:
        name: What messages call it.
        url: Where it will answer.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        port: ReservedPort,
        host: str = "127.0.0.1",
        cores: Sequence[int] = (),
        log_path: Path | None = None,
        grace_s: float = 5.0,
        folder: Path | None = None,
    ) -> None:
        """Start it and return at once.

        Args:
            name: What messages call it.
            argv: Its command.
            env: Its whole environment.
            port: The port that `argv` tells it; released with the server.
            host: The address that `argv` tells it.
            cores: CPU cores that it is pinned to; empty leaves it free.
            log_path: File its output is appended to; None keeps it in a temporary file without a name.
            grace_s: How long it may take to end after SIGTERM.
            folder: Its own, which goes with it, even if this process does not see that.

        Raises:
            OSError: the log cannot be opened, or no process can be started.
        """
        self.name = name
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port.number}"
        self._port = port
        self._grace_s = grace_s
        self._folder = folder
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._pid_lock = threading.Lock()
        self._log = ServerLog(log_path)
        self._line, theirs = socket.socketpair()
        settings = ("0", str(os.getpid()), str(grace_s), ",".join(str(core) for core in cores), str(folder or ""))
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *settings, "--", *argv],
                stdin=theirs.fileno(),
                stdout=self._log.fileno(),
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        except OSError:
            self._line.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    @property
    def guard_pid(self) -> int:
        """Process id of the guard."""
        return self._guard.pid

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group; waits until the guard has started it.

        Raises:
            EngineDiedError: the guard could not start it.
        """
        deadline = time.monotonic() + _PID_WAIT_S
        while (pid := self._learn_pid(_PID_POLL_S)) is None and self.is_alive() and time.monotonic() < deadline:
            continue
        if pid is None:
            raise EngineDiedError(f"vLLM {self.name} never started: {self.describe_end()}")
        return pid

    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._guard.poll() is None

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of its log, without vLLM's prefixes."""
        return self._log.tail(lines)

    def port_taken(self) -> bool:
        """Whether it ended because somebody else had its port."""
        return not self.is_alive() and self._log.port_taken()

    def describe_end(self) -> str:
        """One line: how it ended, or that it did not; why if its log says so; and the last lines of its log."""
        code = self._guard.poll()
        if code is None:
            end = "was still running"
        elif code == guard.BAD_CORES:
            end = "could not be pinned"
        elif code == guard.NO_COMMAND:
            end = "could not be started"
        elif code < 0:
            end = f"lost its guard (signal {-code})"
        elif code > 128:
            end = f"was ended by signal {code - 128}"
        else:
            end = f"exited with code {code}"
        cause = self._log.cause()
        tail = " | ".join(self.log_tail(_DESCRIBED_LINES)) or "(empty)"
        return f"{end}{f': {cause}' if cause else ''}; last lines of its log: {tail}"

    def stop(self, *, kill: bool = False) -> None:
        """End it and everything it started; returns within `grace_s` plus a few seconds, and may be called again.

        Args:
            kill: Do without the grace, for a server that hangs.
        """
        with self._lock:
            if self._line.fileno() < 0:
                return
            pid = self._learn_pid(0.0)
            with contextlib.suppress(OSError):
                if kill:
                    self._line.sendall(guard.KILL)
                self._line.shutdown(socket.SHUT_WR)
            try:
                self._guard.wait(_PATIENCE_S + (0.0 if kill else self._grace_s))
            except subprocess.TimeoutExpired:
                pid = pid or self._learn_pid(0.0)
                self._guard.kill()
                self._guard.wait()
            if self._guard.returncode < 0 and pid is not None:
                # Nobody but us is left to do it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self._line.close()
            self._port.release()
            if self._folder is not None:
                # Nothing is left of it, unless the guard was killed.
                shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Stop it and close its log; may be called again."""
        self.stop()
        self._log.close()

    def _learn_pid(self, limit_s: float) -> int | None:
        with self._pid_lock:
            if self._pid is None and self._line.fileno() >= 0:
                with contextlib.suppress(OSError):
                    self._line.settimeout(limit_s)
                    self._pid = int(self._line.recv(32) or 0) or None
            return self._pid
