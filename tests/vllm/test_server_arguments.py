"""Command lines, environments and transports from the settings. Nothing is started."""

import json
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lightning_ppo.errors import ConfigError, EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.server_arguments import ServerCommand
from lightning_ppo.rollout.vllm.server_folder import make_server_folder
from lightning_ppo.rollout.vllm.transports import choose_transport, make_transport


def command(can_sleep=False, **settings):
    return ServerCommand(VLLMConfig(**settings), "{}", 128, can_sleep)


def option(arguments, name):
    return arguments[arguments.index(name) + 1] if name in arguments else None


def test_on_a_cpu(tmp_path):
    arguments = command(device="cpu", extra_arguments=("--dtype", "bfloat16")).arguments("127.0.0.1", 8000, tmp_path)
    assert option(arguments, "--model") == str(tmp_path)
    assert option(arguments, "--port") == "8000"
    assert option(arguments, "--max-model-len") == "128"
    assert option(arguments, "--kv-cache-memory-bytes") == str(256 * 2**20)
    assert json.loads(option(arguments, "--weight-transfer-config")) == {"backend": "lightning_ppo"}
    assert option(arguments, "--scheduling-policy") == "priority", "a probe must not wait behind all responses"
    assert "--enforce-eager" in arguments
    assert "--gpu-memory-utilization" not in arguments
    assert "--tensor-parallel-size" not in arguments
    # the user's come last, and win
    assert arguments[-2:] == ["--dtype", "bfloat16"]


def test_on_gpus(tmp_path):
    settings = {"device": "cuda", "devices_per_server": 2, "num_servers": 2, "gpu_memory_fraction": 0.5}
    ours = command(can_sleep=True, **settings)
    arguments = ours.arguments("127.0.0.1", 8000, tmp_path)
    assert option(arguments, "--tensor-parallel-size") == "2"
    assert option(arguments, "--gpu-memory-utilization") == "0.5"
    assert "--enforce-eager" not in arguments
    assert "--enable-sleep-mode" in arguments
    assert ours.environment(1, {}, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert ours.environment(1, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, tmp_path)["CUDA_VISIBLE_DEVICES"] == "5,4"
    with pytest.raises(ConfigError, match="are not among the 1 that CUDA_VISIBLE_DEVICES names"):
        ours.environment(1, {"CUDA_VISIBLE_DEVICES": "7"}, tmp_path)
    named = command(device="cuda", num_servers=2, devices=(3, 1), kv_cache_bytes=100, enforce_eager=True)
    assert [named.environment(index, {}, tmp_path)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["3", "1"]
    assert option(named.arguments("127.0.0.1", 1, tmp_path), "--kv-cache-memory-bytes") == "100"
    assert "--enforce-eager" in named.arguments("127.0.0.1", 1, tmp_path)
    by_ray = command(device="cuda", placement="ray")
    assert "CUDA_VISIBLE_DEVICES" not in by_ray.environment(0, {}, tmp_path)


def test_environment(tmp_path):
    base = {"HOME": "/home/x", "RANK": "1", "MASTER_ADDR": "a", "OMP_NUM_THREADS": "8", "VLLM_PLUGINS": "other"}
    ours = command(device="cpu", num_threads=2, environment={"HF_HUB_OFFLINE": "0"}).environment(0, base, tmp_path)
    assert (ours["HOME"], ours["OMP_NUM_THREADS"], ours["HF_HUB_OFFLINE"]) == ("/home/x", "2", "0")
    assert (ours["VLLM_SERVER_DEV_MODE"], ours["VLLM_PLUGINS"]) == ("1", "other,lightning_ppo")
    assert not {"RANK", "MASTER_ADDR"} & ours.keys()
    assert "VLLM_PLUGINS" not in command(device="cpu").environment(0, {}, tmp_path)
    assert ours["LIGHTNING_PPO_CPU_WEIGHTS"] == "packed"
    plain = command(device="cpu", cpu_weights="plain").environment(0, base, tmp_path)
    assert plain["LIGHTNING_PPO_CPU_WEIGHTS"] == "plain"
    for settings in ({"cpu_weights": "vllm"}, {"devices_per_server": 2}):
        others = command(device="cpu", **settings).environment(0, base, tmp_path)
        assert "LIGHTNING_PPO_CPU_WEIGHTS" not in others


def test_the_servers_folder_holds_the_config_and_what_is_temporary(tmp_path, make_spec):
    ours = ServerCommand.of(VLLMConfig(device="cpu"), make_spec())
    arguments, environment = ours(0, "127.0.0.1", 8000, tmp_path)
    model = Path(option(arguments, "--model"))
    assert [path.name for path in model.iterdir()] == ["config.json"]
    assert model.parent == tmp_path
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 90
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == str(tmp_path)


def test_a_policy_without_an_architecture_is_refused(make_spec):
    with pytest.raises(EngineError, match="architectures"):
        ServerCommand.of(VLLMConfig(device="cpu"), make_spec(architectures=None))


def test_compiled_code_is_kept_where_it_was(tmp_path):
    ours = command(device="cpu", environment={"TMPDIR": "/users"})
    environment = ours.environment(0, {"TMPDIR": "/before"}, tmp_path)
    assert environment["TMPDIR"] == "/users"
    assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]) == Path("/before", Path(default_cache_dir()).name)
    kept = ours.environment(0, {"TORCHINDUCTOR_CACHE_DIR": "/cache"}, tmp_path)
    assert kept["TORCHINDUCTOR_CACHE_DIR"] == "/cache"


def test_the_paths_of_sockets_in_a_servers_folder_are_short_enough(monkeypatch, caplog):
    """A unix socket's path has at most 107 characters, and vLLM's sockets are called by UUIDs."""
    for length in (47, 48):
        parent = Path(tempfile.mkdtemp(dir="/tmp"))
        long = parent / ("y" * (length - len(f"{parent}/")))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        folder = make_server_folder()
        try:
            with socket.socket(socket.AF_UNIX) as own:
                own.bind(f"{folder}/{uuid.uuid4()}")
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(parent)
        assert (folder.parent == long) == (length == 47)
        assert ("set one of at most 47 characters" in caplog.text) == (length == 48)


@pytest.mark.parametrize(
    ("settings", "is_here", "kind"),
    [
        ({}, True, "shared_memory"),
        ({"placement": "ray"}, True, "shared_memory"),
        ({"placement": "ray"}, False, "gloo"),
        ({"placement": "ray", "device": "cuda"}, False, "nccl"),
        ({"placement": "ray", "transfer_folder": "/shared"}, False, "file"),
        ({"urls": ("http://a:1",)}, False, "gloo"),
        ({"urls": ("http://a:1",), "transfer_folder": "/shared"}, False, "file"),
        ({"urls": ("http://a:1",), "transport": "shared_memory"}, False, "shared_memory"),
        ({"transport": "nccl"}, True, "nccl"),
    ],
)
def test_auto_transport(settings, is_here, kind):
    config = VLLMConfig(**{"device": "cpu", **settings})
    assert choose_transport(config, is_here=is_here) == kind
    classes = {"shared_memory": SharedMemoryTransport, "file": FileTransport, "gloo": GroupTransport}
    if kind in classes:
        made = make_transport(config, is_here=is_here)
        assert type(made) is classes[kind]
        made.close()
