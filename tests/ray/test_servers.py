import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from processes import is_gone, wait_for

from lightning_ppo.errors import ConfigError, EngineDiedError, EngineError
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.servers import RayLauncher
from lightning_ppo.rollout.vllm.config import VLLMConfig

SERVER = """
import http.server, json, os, signal, subprocess, sys
words = sys.argv[3:]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"]).pid
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        names = ("CUDA_VISIBLE_DEVICES", "FAKE", "OMP_NUM_THREADS")
        env = {name: os.environ.get(name) for name in names}
        found = {"pid": os.getpid(), "child": child, "env": env, "cores": sorted(os.sched_getaffinity(0))}
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *arguments):
        pass
for word in words:
    if word.startswith("say="):
        print(word[4:], flush=True)
    if word.startswith("exit="):
        sys.exit(int(word[5:]))
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def launch(runtime, tmp_path):
    """Make launchers of a fake server: `launch(*words, **settings)`; they are closed, and no process may be left."""
    launchers, pids = [], []
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    @dataclass(frozen=True)
    class Command:
        words: tuple[str, ...]
        environment: dict[str, str] = field(default_factory=dict)

        def __call__(self, index, host, port, folder):
            argv = [sys.executable, "-S", str(script), host, str(port), *self.words]
            return argv, {**os.environ, "FAKE": str(index)}

    def make(*words, log_folder=None, on_gpus=False, ray=None, device="cpu", command=None, **settings):
        # Other settings for the Ray that runs.
        other = RayRuntime(RayConfig(**{"num_cpus_per_server": 0.5, **(ray or {})}))
        other.start()
        config = VLLMConfig(placement="ray", device=device, **settings)
        launcher = RayLauncher(other, config, command or Command(words), log_folder, on_gpus=on_gpus)
        launchers.append(launcher)
        return launcher

    make.pids = pids
    yield make
    for launcher in launchers:
        launcher.close()
    gone = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 30)[1]
    assert [process for process in gone if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def info(launch):
    """What a server tells of itself, once it answers; its processes are watched."""

    def ask(server):
        found = {}

        def answers():
            try:
                with urllib.request.urlopen(server.url, timeout=5) as response:
                    found.update(json.load(response))
            except urllib.error.URLError:
                assert server.is_alive(), server.describe_end()
                return False
            return True

        wait_for(answers, f"an answer of {server.name}", 30)
        launch.pids.extend((found["pid"], found["child"], server.actor_pid))
        return found

    return ask


@pytest.fixture
def ends():
    """Wait until a server that answered is dead with all its processes."""

    def wait(server, found):
        wait_for(lambda: not server.is_alive(), f"the end of {server.name}", 30)
        wait_for(lambda: is_gone(found["pid"]) and is_gone(found["child"]), f"the end of {found}", 30)

    return wait


def test_two_servers_start_answer_and_stop(launch, info):
    import ray

    launcher = launch("say=hello", num_servers=2)
    servers = [launcher.launch(index) for index in range(2)]
    found = [info(server) for server in servers]
    assert [server.name for server in servers] == ["server_0", "server_1"]
    assert len({server.url for server in servers}) == 2
    assert all(server.url.startswith("http://127.0.0.1:") for server in servers)
    assert [server.pid for server in servers] == [one["pid"] for one in found]
    assert len({server.actor_pid for server in servers}) == 2
    assert [one["env"]["FAKE"] for one in found] == ["0", "1"]
    assert all(server.is_alive() and not server.port_taken() for server in servers)
    assert servers[0].log_tail(3) == ["hello"]
    assert servers[0].describe_end() == "was still running; last lines of its log: hello"

    servers[0].stop()
    servers[0].stop()
    assert not servers[0].is_alive()
    assert is_gone(found[0]["pid"])
    assert is_gone(found[0]["child"])
    assert servers[1].is_alive()
    assert "signal 15" in servers[0].describe_end()
    assert servers[0].log_tail(3) == ["hello"]

    launcher.close()
    launcher.close()
    assert not servers[1].is_alive()
    assert is_gone(found[1]["pid"])
    wait_for(lambda: ray.available_resources().get("CPU") == 2, "the return of what was reserved", 30)
    with pytest.raises(EngineError, match="vLLM server_0 cannot start: its launcher is closed"):
        launcher.launch(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["server", "guard", "actor", "ray.kill"])
def test_a_server_that_died_comes_back_in_its_place(launch, info, ends, how):
    """Whatever dies, all of it is gone, even a server that ignores SIGTERM; the other server is not disturbed."""
    import ray

    # The one server slot of each bundle is used again, or the new server would wait for ever.
    launcher = launch("stubborn", num_servers=2, ray={"num_cpus_per_server": 1.0})
    servers = [launcher.launch(index) for index in range(2)]
    first, other = map(info, servers)
    if how == "server":
        os.kill(first["pid"], signal.SIGKILL)
    elif how == "guard":
        os.kill(psutil.Process(first["pid"]).ppid(), signal.SIGKILL)
    elif how == "actor":
        os.kill(servers[0].actor_pid, signal.SIGKILL)
    else:
        ray.kill(servers[0]._actor)
    ends(servers[0], first)
    end = servers[0].describe_end()
    expected = {"server": "was ended by signal 9", "guard": "lost its guard (signal 9)"}
    assert expected.get(how, "lost its Ray actor") in end
    assert "\n" not in end
    assert not servers[0].port_taken()

    again = launcher.launch(0)
    second = info(again)
    assert second["pid"] != first["pid"]
    assert second["env"]["FAKE"] == "0"
    assert again.is_alive()
    assert not servers[0].is_alive()
    assert info(servers[1])["pid"] == other["pid"]


def test_a_stubborn_server_is_killed(launch, info):
    server = launch("stubborn").launch(0)
    found = info(server)
    server.stop(kill=True)
    assert is_gone(found["pid"])
    assert is_gone(found["child"])
    assert "signal 9" in server.describe_end()


def test_a_server_that_ends_by_itself_says_why(launch, tmp_path):
    server = launch("say=OSError: [Errno 98] Address already in use", "exit=3", log_folder=tmp_path / "logs").launch(0)
    wait_for(lambda: not server.is_alive(), "its end", 30)
    assert server.port_taken()
    assert server.log_tail(5) == ["OSError: [Errno 98] Address already in use"]
    end = server.describe_end()
    assert end.startswith("exited with code 3: its port is in use")
    assert "\n" not in end
    assert (tmp_path / "logs" / "server_0.log").read_text().startswith("OSError")


def test_what_cannot_be_started_is_one_line(launch):
    class Broken:
        def __call__(self, index, host, port, folder):
            raise ValueError(f"no model for {index}")

    server = launch(command=Broken()).launch(0)
    with pytest.raises(EngineError) as caught:
        _ = server.url
    why = "vLLM server_0 could not be started on node 127.0.0.1: ValueError: no model for 0"
    assert str(caught.value) == why
    with pytest.raises(EngineError, match="no model for 0"):
        _ = server.pid

    with pytest.raises(EngineError, match=r"^how vLLM servers are started cannot be sent to Ray \(TypeError: c.*\)$"):
        launch(command=Unpicklable())


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()


def test_it_is_pinned_and_sees_no_gpu_unless_it_reserves_one(launch, info):
    found = info(launch(cores=(0,), device="auto").launch(0))
    assert found["cores"] == [0]
    assert found["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_what_the_cluster_cannot_hold_is_said_before_anything_waits(launch):
    with pytest.raises(
        ConfigError, match=r"^vllm\.num_servers=5 needs 5 x \(0\.5 CPU\), but Ray has room for 4: 2 CPU"
    ):
        launch(num_servers=5)
    with pytest.raises(
        ConfigError, match=r"needs 1 x \(0\.5 CPU, 2 GPU\), but Ray has room for 0: 2 CPU, 0 GPU on 1 n"
    ):
        launch(on_gpus=True, devices_per_server=2)
    with pytest.raises(
        ConfigError, match=r"needs 2 x .* with placement_strategy=STRICT_SPREAD, but Ray has room for 1"
    ):
        launch(num_servers=2, ray={"placement_strategy": "STRICT_SPREAD"})
    with pytest.raises(ConfigError, match=r"\(0\.5 CPU, 1 rack\)"):
        launch(ray={"resources_per_server": {"rack": 1}})


def test_what_others_use_is_waited_for_with_a_deadline(launch, info):
    first = launch(ray={"num_cpus_per_server": 2}).launch(0)
    info(first)
    second = launch(ray={"num_cpus_per_server": 2}, start_timeout_s=1.0).launch(0)
    assert second.is_alive()
    with pytest.raises(EngineError) as caught:
        _ = second.url
    assert str(caught.value) == (
        "vllm.start_timeout_s=1 ran out: vLLM server_0 waits for Ray to place it (needs 2 CPU; free: 0 CPU);"
        " free some, or ask for less"
    )
    second.close()
    assert not second.is_alive()


def test_closing_ends_who_waits_for_a_place(launch, info):
    """The keeper of a fleet waits in `url` while the fleet is closed."""
    info(launch(ray={"num_cpus_per_server": 2}).launch(0))
    launcher = launch(ray={"num_cpus_per_server": 2}, start_timeout_s=60.0)
    server, errors = launcher.launch(0), []

    def wait():
        try:
            _ = server.url
        except EngineDiedError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    launcher.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert errors[0].startswith("vLLM server_0 lost its Ray actor")


def test_without_ray_nothing_is_launched_and_nothing_hangs(runtime):
    other = RayRuntime(RayConfig())
    other.start()
    launcher = RayLauncher(other, VLLMConfig(device="cpu"), lambda *_: ([], {}), Path("/nowhere"), on_gpus=False)
    other.close()
    with pytest.raises(EngineError, match="vLLM server_0 cannot start: Ray is shut down"):
        launcher.launch(0)
    launcher.close()


LOCAL_GPUS = """
import os, sys
import ray
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.config import RayConfig

os.environ["CUDA_VISIBLE_DEVICES"] = "7,5,3"
runtime = RayRuntime(RayConfig(), gpus=["5", "3"])
runtime.start()
assert os.environ["CUDA_VISIBLE_DEVICES"] == "7,5,3"

@ray.remote(num_gpus=1, num_cpus=0)
class Server:
    def seen(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

servers = [Server.remote() for _ in range(2)]
print(*ray.get([server.seen.remote() for server in servers], timeout=60))
assert ray.cluster_resources()["GPU"] == 2
runtime.close()
"""


@pytest.mark.slow
def test_a_local_ray_hands_out_what_the_trainer_leaves():
    """Without its GPUs' numbers it would give the first server the trainer's own."""
    found = subprocess.run([sys.executable, "-c", LOCAL_GPUS], check=True, timeout=200, capture_output=True, text=True)
    assert sorted(found.stdout.split()) == ["3", "5"]


GPUS = """
import os, sys, time
from pathlib import Path
import ray
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.servers import RayLauncher
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.vllm.config import VLLMConfig

folder = Path(sys.argv[1])
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

class Command:
    def __call__(self, index, host, port, own_folder):
        code = "import os, sys, time; open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(300)"
        return [sys.executable, "-S", "-c", code, str(folder / str(index))], dict(os.environ)

runtime = RayRuntime(RayConfig())
runtime.start()
config = VLLMConfig(device="cuda", placement="ray", num_servers=2, devices_per_server=2)
launcher = RayLauncher(runtime, config, Command(), on_gpus=True)
servers = [launcher.launch(index) for index in range(2)]
deadline = time.monotonic() + 60
while len([path for path in folder.iterdir() if path.read_text()]) < 2 and time.monotonic() < deadline:
    assert all(server.is_alive() for server in servers), [server.describe_end() for server in servers]
    time.sleep(0.1)
launcher.close()
runtime.close()
assert ray.is_initialized()
"""


@pytest.mark.slow
def test_ray_tells_servers_their_gpus(tmp_path):
    """On GPUs that only Ray's book-keeping knows of: two for each server, none for two."""
    command = [sys.executable, "-c", GPUS, str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    seen = [(tmp_path / str(index)).read_text().split(",") for index in range(2)]
    assert [len(one) for one in seen] == [2, 2]
    assert sorted(seen[0] + seen[1]) == ["0", "1", "2", "3"]
