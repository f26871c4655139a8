"""The engine's process as the trainer sees it: its start, its log, its end."""

import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import lightning_ppo
from lightning_ppo.rollout.local.protocol import Command, Reply

_TAIL_BYTES = 8192
_TAIL_LINES = 5
_EXIT_GRACE_S = 2.0


class WorkerProcess:
    """A running worker, the two sockets to it, and its log.

    Attributes:
        commands: Connection for commands and replies.
        files: Socket that file descriptors are sent over.
    """

    def __init__(self, num_threads: int, log_path: Path | None) -> None:
        """Start the process; its output goes to `log_path`, or to a temporary file without a name."""
        self._log: IO[bytes]
        if log_path is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        else:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = log_path.open("ab+")
        self._log_start = os.fstat(self._log.fileno()).st_size
        ours, theirs = socket.socketpair()
        self.files, their_files = socket.socketpair()
        # Connection closes its descriptor itself; the socket object must not own it as well.
        self.commands: Connection[list[Command], Reply] = Connection(ours.detach())
        threads = str(num_threads)
        root = str(Path(lightning_ppo.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "lightning_ppo.rollout.local.worker"),
                    *(str(theirs.fileno()), str(their_files.fileno())),
                ],
                pass_fds=(theirs.fileno(), their_files.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        finally:
            theirs.close()
            their_files.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def describe_end(self) -> str:
        """One line: how the process ended, and the last lines of its log."""
        try:
            code: int | None = self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        end = "stopped answering" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"local engine (pid {self.pid}) is gone: {end}; last lines of its log: {self._tail() or '(empty)'}"

    def stop(self) -> None:
        """End the process, politely first; returns within a few seconds and may be called again."""
        if self.is_alive():
            self._process.terminate()
            try:
                self._process.wait(_EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_EXIT_GRACE_S)

    def close(self) -> None:
        """Close sockets and log; call `stop` first, and let no thread use `commands` any more."""
        self.commands.close()
        self.files.close()
        self._log.close()

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - _TAIL_BYTES)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:])
