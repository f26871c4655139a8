"""The guard: no server, and nothing that a server started, outlives its trainer."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_gone, wait_for

from lightning_ppo.rollout.vllm import guard

FAKE = str(Path(__file__).with_name("fake_server.py"))
HOLDER = """
import os, signal, sys, time
# a test run in the background was told to ignore it, and hands that on
signal.signal(signal.SIGINT, signal.default_int_handler)
from lightning_ppo.rollout.vllm.port import ReservedPort
from lightning_ppo.rollout.vllm.process import ServerProcess
from lightning_ppo.rollout.vllm.server_folder import make_server_folder
port = ReservedPort("127.0.0.1")
argv = [sys.executable, sys.argv[1], str(port.number), *sys.argv[2:]]
folder = make_server_folder()
(folder / "socket").touch()
server = ServerProcess("server_0", argv, os.environ, port=port, grace_s=0.5, folder=folder)
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print(server.guard_pid, server.pid, folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path):
    """Start a holder of a fake server; gives (holder, pid of the guard, pids of the server and its child)."""
    holders, seen, folders = [], [], []

    def start(*words, **popen):
        pids = tmp_path / "pids"
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, FAKE, *words, f"pids={pids}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **popen,
        )
        holders.append(holder)
        *numbers, folder = holder.stdout.readline().split()
        guard_pid, pid = map(int, numbers)
        folders.append(Path(folder))
        assert folders[-1].is_dir()
        server, child = wait_for(lambda: json.loads(pids.read_text()) if pids.exists() and pids.read_text() else None)
        assert server == pid
        seen.extend(pid for pid in (guard_pid, server, child) if pid is not None)
        return holder, guard_pid, [pid for pid in (server, child) if pid is not None]

    start.left = []
    start.folders = folders
    yield start
    for holder in holders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.wait(10)
        holder.stdout.close()
    for pid in seen:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
    # that of a server whose guard was killed as well is left
    has_folder = [folder for folder in folders if folder.exists()]
    for folder in has_folder:
        shutil.rmtree(folder)
    assert has_folder == start.left


def all_gone(pids):
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    return True


@pytest.mark.parametrize("words", [["grandchild"], ["session"], ["ignore_term", "grandchild"]])
def test_kill_9_of_the_trainer_leaves_nothing(hold, words):
    holder, guard_pid, pids = hold(*words)
    assert not any(is_gone(pid) for pid in [guard_pid, *pids])
    holder.kill()
    assert all_gone([guard_pid, *pids])


@pytest.mark.parametrize("who", ["trainer", "server", "guard told"])
def test_shared_memory_of_what_was_killed_is_unlinked(hold, tmp_path, who):
    """The tracker of the killed process does it, which ends only after everybody who could use the memory."""
    name = tmp_path / "name"
    holder, guard_pid, pids = hold("ignore_term", "session", f"memory={name}")
    memory = wait_for(lambda: name.exists() and name.read_text() and Path("/dev/shm", name.read_text()))
    assert memory.exists()
    if who == "trainer":
        holder.kill()
    elif who == "server":
        os.kill(pids[0], signal.SIGKILL)
    else:
        os.kill(guard_pid, signal.SIGTERM)
    assert all_gone([guard_pid, *pids])
    assert not memory.exists()


def test_a_forked_child_of_the_trainer_does_not_keep_the_server_alive(hold):
    """It inherits the trainer's end of the socket, which therefore stays open."""
    holder, guard_pid, pids = hold("grandchild", "fork")
    holder.kill()
    holder.wait(10)
    assert all_gone([guard_pid, *pids])


def test_kill_9_of_the_server_ends_what_it_started(hold):
    _, guard_pid, (server, child) = hold("grandchild")
    os.kill(server, signal.SIGKILL)
    assert all_gone([guard_pid, server, child])


def test_kill_9_of_the_guard_ends_the_server_politely(hold):
    _, guard_pid, (server,) = hold()
    os.kill(guard_pid, signal.SIGKILL)
    assert all_gone([server])
    hold.left.extend(hold.folders)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_everything(hold, number):
    _, guard_pid, pids = hold("ignore_term", "grandchild")
    os.kill(guard_pid, number)
    assert all_gone([guard_pid, *pids])


def test_ctrl_c_is_for_the_trainer_only(hold):
    holder, guard_pid, pids = hold("grandchild")
    groups = {os.getpgid(pid) for pid in [guard_pid, *pids]}
    assert os.getpgid(holder.pid) not in groups
    assert {os.getsid(pid) for pid in [guard_pid, *pids]}.isdisjoint({os.getsid(holder.pid)})
    os.kill(guard_pid, signal.SIGINT)
    time.sleep(0.3)
    assert not any(is_gone(pid) for pid in [guard_pid, *pids])
    # What a terminal does
    os.killpg(holder.pid, signal.SIGINT)
    holder.wait(10)
    assert all_gone([guard_pid, *pids])


def test_nothing_heavy_is_imported():
    code = (
        "import sys, lightning_ppo.rollout.vllm.guard\n"
        "print([n for n in ('torch', 'lightning', 'numpy', 'transformers', 'vllm') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def run_guard(*arguments):
    command = [sys.executable, "-m", "lightning_ppo.rollout.vllm.guard", "0", str(os.getpid()), "1", *arguments]
    # The other end stays open until the test is over: only the command's own end counts.
    ours, theirs = socket.socketpair()
    try:
        return subprocess.run(command, stdin=theirs.fileno(), capture_output=True, text=True, timeout=60)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_the_exit_code_is_the_commands(code, expected):
    assert run_guard("", "", "--", sys.executable, "-S", "-c", code).returncode == expected


def test_a_command_that_does_not_exist():
    result = run_guard("", "", "--", "/no/such/command")
    assert result.returncode == guard.NO_COMMAND
    assert "command=/no/such/command cannot be started" in result.stderr


def test_cores_that_do_not_exist():
    result = run_guard("0,99999", "", "--", sys.executable, "-c", "print('started')")
    assert result.returncode == guard.BAD_CORES
    assert "vllm.cores=[0, 99999] cannot be had" in result.stderr
    assert "started" not in result.stdout


def test_the_command_may_be_interrupted():
    """A signal that the guard ignored would be ignored in the command, too."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run_guard("", "", "--", sys.executable, "-S", "-c", code).stdout.strip() == "True"
