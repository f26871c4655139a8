"""A small process between the trainer and one server, so that no server outlives its trainer.

`python -m lightning_ppo.rollout.vllm.guard FD TRAINER_PID GRACE_S CORES FOLDER -- COMMAND...`

It starts the command in a session of its own, sends the command's process id over the socket FD, and ends with it. When
the socket closes, the trainer is gone, or SIGTERM or SIGHUP arrives, it ends the command's whole process group: SIGTERM
first, SIGKILL after GRACE_S. When the command ends by itself, what is left of its group is ended too (vLLM's EngineCore
survives the death of the API server otherwise). Python's resource trackers go last: they unlink the shared memory of
those that were killed. Then it removes FOLDER, the command's own. If the guard itself is killed, the kernel sends
SIGTERM to the command.

Ctrl-C is left to the trainer. Nothing heavy is imported: the trainer starts this file by path.
"""

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

KILL = b"k"
"""Sent by the trainer to skip the grace; closing the socket asks politely."""
BAD_CORES = 96
NO_COMMAND = 97
"""Exit codes of the guard itself; any other is the command's, or 128 + the signal that ended it."""

_TRAINER_CHECK_S = 0.5
_POLL_S = 0.02
_LEFTOVER_GRACE_S = 1.0
_TRACKER_GRACE_S = 2.0
_TRACKER = b"multiprocessing.resource_tracker"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


class Guard:
    """The command, the line to the trainer, and the reasons to end."""

    def __init__(self, line: socket.socket, trainer_pid: int, grace_s: float, argv: Sequence[str]) -> None:
        """Start the command; its output is the guard's own."""
        self._line = line
        self._trainer_pid = trainer_pid
        self._grace_s = grace_s
        self._told = False
        self._wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the command.
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_told)
        # Orphans of the command become children of the guard, which then ends and reaps them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        guard_pid = os.getpid()

        def tie_to_guard() -> None:
            # SIGTERM, not SIGKILL: a server that gets SIGTERM ends its own children.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guard_pid:
                os._exit(1)

        self._command = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie_to_guard
        )

    def run(self) -> int:
        """Wait for the end, bring it about if asked to, and leave nothing behind.

        Returns:
            The command's exit code, or 128 + the number of the signal that ended it.
        """
        kill = False
        try:
            self._line.sendall(b"%d\n" % self._command.pid)
            kill = self._wait()
        except OSError:
            # The trainer went before it heard of the command.
            kill = False
        finally:
            ended = self._command.poll() is not None
            self._end_group(0.0 if kill else _LEFTOVER_GRACE_S if ended else self._grace_s)
        code = self._command.wait()
        return code if code >= 0 else 128 - code

    def _wait(self) -> bool:
        while self._command.poll() is None and not self._told and os.getppid() == self._trainer_pid:
            readable, _, _ = select.select([self._line.fileno(), self._wake], [], [], _TRAINER_CHECK_S)
            if self._wake in readable:
                os.read(self._wake, 512)
                self._reap()
            if self._line.fileno() in readable:
                return self._line.recv(1) == KILL
        return False

    def _end_group(self, grace_s: float) -> None:
        if grace_s > 0:
            self._signal_group(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self._has_survivors() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self._kill_all_but_trackers()
        # A tracker ends by itself once all that could still use what it tracks are gone.
        deadline = time.monotonic() + _TRACKER_GRACE_S
        while self._has_survivors() and _descendants() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._signal_group(signal.SIGKILL)
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        while self._has_survivors() and time.monotonic() < deadline:
            # Descendants that left the group came to the guard when their parents ended.
            _kill(_children())
            time.sleep(_POLL_S)

    def _kill_all_but_trackers(self) -> None:
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        while (others := [pid for pid in _descendants() if not _is_tracker(pid)]) and time.monotonic() < deadline:
            _kill(others)
            time.sleep(_POLL_S)
            self._reap()

    def _signal_group(self, number: int) -> bool:
        """Whether there is anybody left to get the signal."""
        # The number cannot belong to others: the kernel does not use it again while a member of the group lives.
        try:
            os.killpg(self._command.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _has_survivors(self) -> bool:
        """Whether a process of the group or another child of the guard still runs."""
        self._reap()
        return self._signal_group(0) or bool(_children())

    def _reap(self) -> None:
        self._command.poll()
        for pid in _children():
            if pid != self._command.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _on_told(self, *_: object) -> None:
        self._told = True


def _children(parent: int | str = "self") -> list[int]:
    """Child processes, those of each thread; none where there is no /proc."""
    children: list[int] = []
    for path in glob.glob(f"/proc/{parent}/task/*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            children += [int(pid) for pid in file.read().split()]
    return children


def _descendants() -> list[int]:
    """Everything below the guard, which adopts orphans: what left the group is among it."""
    found = _children()
    # grows while it is gone through
    for pid in found:
        found += _children(pid)
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    """Run the guard.

    Args:
        arguments: FD, TRAINER_PID, GRACE_S, CORES (comma-separated, may be empty), FOLDER (may be empty), `--`, and the
            command.

    Returns:
        The exit code.
    """
    descriptor, trainer_pid, grace_s, cores, folder, _, *argv = arguments
    try:
        return _guard(
            int(descriptor), int(trainer_pid), float(grace_s), {int(core) for core in cores.split(",") if core}, argv
        )
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _guard(descriptor: int, trainer_pid: int, grace_s: float, wanted: set[int], argv: Sequence[str]) -> int:
    line = socket.socket(fileno=descriptor)
    line.set_inheritable(False)
    if wanted:
        reason = "this machine cannot pin processes"
        try:
            os.sched_setaffinity(0, wanted)
            got = os.sched_getaffinity(0)
            reason = f"only {sorted(got)} can be had"
        except (AttributeError, OSError) as error:
            got, reason = set(), str(error)
        if got != wanted:
            print(f"vllm.cores={sorted(wanted)} cannot be had: {reason}; set cores of this machine", file=sys.stderr)
            return BAD_CORES
    try:
        guard = Guard(line, trainer_pid, grace_s, argv)
    except OSError as error:
        print(f"command={argv[0]} cannot be started: {error}", file=sys.stderr)
        return NO_COMMAND
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
