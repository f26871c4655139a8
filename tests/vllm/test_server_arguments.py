"""Command lines, environments and transports from the settings. Nothing is started."""

import json

import pytest

from lightning_ppo.errors import ConfigError, EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.server_arguments import ServerCommand, write_model_folder
from lightning_ppo.rollout.vllm.transports import choose_transport, make_transport


def command(tmp_path, can_sleep=False, **settings):
    return ServerCommand(VLLMConfig(**settings), tmp_path, "{}", 128, can_sleep)


def option(arguments, name):
    return arguments[arguments.index(name) + 1] if name in arguments else None


def test_on_a_cpu(tmp_path):
    arguments = command(tmp_path, device="cpu", extra_arguments=("--dtype", "bfloat16")).arguments("127.0.0.1", 8000)
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
    ours = command(tmp_path, can_sleep=True, **settings)
    arguments = ours.arguments("127.0.0.1", 8000)
    assert option(arguments, "--tensor-parallel-size") == "2"
    assert option(arguments, "--gpu-memory-utilization") == "0.5"
    assert "--enforce-eager" not in arguments
    assert "--enable-sleep-mode" in arguments
    assert ours.environment(1, {})["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert ours.environment(1, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"})["CUDA_VISIBLE_DEVICES"] == "5,4"
    with pytest.raises(ConfigError, match="are not among the 1 that CUDA_VISIBLE_DEVICES names"):
        ours.environment(1, {"CUDA_VISIBLE_DEVICES": "7"})
    named = command(tmp_path, device="cuda", num_servers=2, devices=(3, 1), kv_cache_bytes=100, enforce_eager=True)
    assert [named.environment(index, {})["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["3", "1"]
    assert option(named.arguments("127.0.0.1", 1), "--kv-cache-memory-bytes") == "100"
    assert "--enforce-eager" in named.arguments("127.0.0.1", 1)
    by_ray = command(tmp_path, device="cuda", placement="ray")
    assert "CUDA_VISIBLE_DEVICES" not in by_ray.environment(0, {})


def test_environment(tmp_path):
    base = {"HOME": "/home/x", "RANK": "1", "MASTER_ADDR": "a", "OMP_NUM_THREADS": "8", "VLLM_PLUGINS": "other"}
    ours = command(tmp_path, device="cpu", num_threads=2, environment={"HF_HUB_OFFLINE": "0"}).environment(0, base)
    assert (ours["HOME"], ours["OMP_NUM_THREADS"], ours["HF_HUB_OFFLINE"]) == ("/home/x", "2", "0")
    assert (ours["VLLM_SERVER_DEV_MODE"], ours["VLLM_PLUGINS"]) == ("1", "other,lightning_ppo")
    assert not {"RANK", "MASTER_ADDR"} & ours.keys()
    assert "VLLM_PLUGINS" not in command(tmp_path, device="cpu").environment(0, {})
    assert ours["LIGHTNING_PPO_CPU_WEIGHTS"] == "packed"
    plain = command(tmp_path, device="cpu", cpu_weights="plain").environment(0, base)
    assert plain["LIGHTNING_PPO_CPU_WEIGHTS"] == "plain"
    for settings in ({"cpu_weights": "vllm"}, {"devices_per_server": 2}):
        others = command(tmp_path, device="cpu", **settings).environment(0, base)
        assert "LIGHTNING_PPO_CPU_WEIGHTS" not in others


def test_the_model_folder_holds_the_config_alone(tmp_path, make_spec):
    write_model_folder(tmp_path / "model", make_spec().config_json)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    with pytest.raises(EngineError, match="architectures"):
        write_model_folder(tmp_path / "other", "{}")


def test_a_host_that_does_not_share_the_folder_gets_its_own(tmp_path, make_spec):
    ours = ServerCommand(VLLMConfig(device="cpu"), tmp_path / "model", make_spec().config_json, 128)
    ours(0, "127.0.0.1", 8000)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 90


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
