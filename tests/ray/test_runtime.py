import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil
import pytest
from processes import descendants, is_gone, wait_for

from lightning_ppo.errors import ConfigError, EngineError
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.runtime import RayRuntime


def test_the_local_ray_listens_on_the_loopback_only(runtime):
    import ray

    (node,) = ray.nodes()
    assert node["NodeManagerAddress"] == "127.0.0.1"
    assert runtime.is_local
    assert runtime.is_running
    listening = [
        (name, connection.laddr.ip)
        for name, connections in descendants(lambda each: (each.name(), each.net_connections("inet"))).values()
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any(name == "raylet" for name, _ in listening)
    assert [found for found in listening if found[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []


def test_it_has_at_least_the_cpus_that_were_asked_for(runtime):
    (node,) = runtime.nodes()
    assert node["CPU"] == max(2, os.cpu_count())
    assert runtime.describe_free({"CPU": 1, "GPU": 1}).endswith("0 GPU")


def test_ray_of_this_process_is_used_and_left_alone(runtime):
    import ray

    second = RayRuntime(RayConfig(address="10.255.255.1:6379"))
    second.start()
    second.start()
    assert second.is_running
    assert not second.is_local
    second.close()
    second.close()
    assert not second.is_running
    assert ray.is_initialized()
    assert runtime.is_running


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "nonsense", "host:", ":6379", "host:port"])
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match=r"^ray\.address=\S+ is no address.*; [^\n]+$"):
        RayRuntime(RayConfig(address=address))._cluster_settings()


def test_nobody_at_the_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=rf"^ray\.address={address} does not answer \(ConnectionRefused[^\n]+$"):
            RayRuntime(RayConfig(address=address))._cluster_settings()


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    paths = filter(None, (str(Path(processes.__file__).parent), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_without_ray_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from lightning_ppo.rollout.ray import rewards, servers\n"
        "from lightning_ppo.rollout.ray.runtime import RayRuntime\n"
        "from lightning_ppo.rollout.ray.config import RayConfig\n"
        "RayRuntime(RayConfig()).start()"
    )
    error = run_python(code).stderr.strip().splitlines()[-1]
    assert error == "lightning_ppo.errors.ConfigError: placement=ray needs Ray; install lightning-ppo[ray]"


def test_the_modules_do_not_import_ray():
    code = (
        "import sys\n"
        "from lightning_ppo.rollout.ray import rewards, runtime, servers\n"
        "print([name for name in ('ray', 'vllm', 'lightning') if name in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_what_takes_connections_but_is_no_ray():
    """A deadline of ours instead of the minutes that Ray waits."""
    code = """
import os, socket
from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.config import RayConfig

line = socket.create_server(("127.0.0.1", 0))
try:
    RayRuntime(RayConfig(address=f"127.0.0.1:{line.getsockname()[1]}"), start_timeout_s=3.0).start()
except EngineError as error:
    print(error, flush=True)
os._exit(0)
"""
    (line,) = run_python(code).stdout.splitlines()
    assert "cannot be used: did not within 3 s; start Ray there" in line


@pytest.mark.slow
def test_a_running_cluster_is_used_and_goes_on(runtime):
    """Another process joins the Ray of these tests, has work done there, and leaves."""
    import ray

    code = """
import asyncio, sys
import ray
from lightning_ppo.rollout.ray.rewards import RemoteReward
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.config import RayConfig

runtime = RayRuntime(RayConfig(address=sys.argv[1]))
runtime.start()
reward = RemoteReward(runtime, lambda response: len(response), 1, 10.0)
print(runtime.is_local, asyncio.run(reward(response="abc")))
reward.close()
runtime.close()
assert not ray.is_initialized()
"""
    result = run_python(code, ray.get_runtime_context().gcs_address)
    assert (result.stdout.strip(), result.stderr.strip()) == ("False 3.0", "")
    assert runtime.nodes()[0]["CPU"] == 2


START_AND_STOP = """
import os, signal, sys, threading
import psutil
from processes import command_line, descendants
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.config import RayConfig

before = dict(os.environ)
handler = signal.getsignal(signal.SIGTERM)
cores = os.sched_getaffinity(0)
runtime = RayRuntime(RayConfig(), num_cpus=7)
# like a trainer that is pinned while its servers run
os.sched_setaffinity(0, {min(cores)})
for _ in range(2):
    runtime.start()
    runtime.start()
    affinities = descendants(lambda child: (command_line(child), child.cpu_affinity()))
    children = list(affinities)
    rays = [affinity for line, affinity in affinities.values() if "sweeper.py" not in line]
    assert len(rays) == len(children) - 1, affinities
    assert all(affinity == sorted(cores) for affinity in rays), affinities
    folder = runtime._folder
    assert runtime.is_running and os.path.isdir(folder), folder
    assert runtime.nodes()[0]["CPU"] == 7
    runtime.close()
    runtime.close()
    assert not runtime.is_running and not os.path.exists(folder), folder
    alive = psutil.wait_procs(children, 30)[1]
    assert not alive, alive
changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
# Ray sets these when it is imported
assert changed <= {"RAY_CLIENT_MODE", "PYTHONBREAKPOINT"}, changed
assert signal.getsignal(signal.SIGTERM) is handler
import ray
assert not ray.is_initialized()
print("done")
"""


@pytest.mark.slow
def test_start_and_stop_twice_leave_nothing_behind():
    """No process, no folder, no environment variable, no signal handler; and no warning on the way."""
    result = run_python(START_AND_STOP)
    assert (result.stdout.strip(), result.stderr.strip()) == ("done", "")


DRIVER = """
import json, os, sys, time
from pathlib import Path
import psutil
from lightning_ppo.rollout.ray.rewards import RemoteReward
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.servers import RayLauncher
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.vllm.config import VLLMConfig

runtime = RayRuntime(RayConfig())
runtime.start()

own = Path(sys.argv[1] + ".own")

class Command:
    def __call__(self, index, host, port, folder):
        own.write_text(str(folder))
        code = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(300)"
        return [sys.executable, "-c", code], dict(os.environ)

launcher = RayLauncher(runtime, VLLMConfig(device="cpu", placement="ray"), Command(), on_gpus=False)
server = launcher.launch(0)
reward = RemoteReward(runtime, lambda response: 1.0, 1, 5.0)
while server.log_tail(1) != ["up"]:
    time.sleep(0.1)
pids = {child.pid for child in psutil.Process().children(recursive=True)} | {server.pid, server.actor_pid}
told = {"server": server.pid, "all": sorted(pids), "folder": runtime._folder, "own": own.read_text()}
Path(sys.argv[1]).write_text(json.dumps(told))
time.sleep(300)
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_driver(tmp_path):
    found = tmp_path / "pids.json"
    part = tmp_path / "driver.py"
    part.write_text(DRIVER)
    with (tmp_path / "errors").open("w") as errors:
        driver = subprocess.Popen([sys.executable, str(part), str(found)], stderr=errors, start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while not (found.exists() and found.read_text()):
            assert driver.poll() is None, Path(errors.name).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        told = json.loads(found.read_text())
        assert not is_gone(told["server"])
        assert len(told["all"]) > 5
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(30)

    def survivors() -> list[str]:
        return [title(pid) for pid in told["all"] if not is_gone(pid)]

    # These two see the end like the others, and then give their open connections a minute (aiohttp's default).
    slow = {"ray::DashboardAgent", "ray::RuntimeEnvAgent", ""}
    wait_for(lambda: set(survivors()) <= slow, f"the end of {told}", 30)
    wait_for(lambda: not Path(told["folder"]).exists(), f"the end of {told['folder']}", 30)
    assert not Path(told["own"]).exists()


def title(pid: int) -> str:
    """What a process calls itself; nothing once it is gone."""
    try:
        return (psutil.Process(pid).cmdline() or [""])[0]
    except psutil.NoSuchProcess:
        return ""
