"""Which GPUs servers get: those that the trainer leaves, unless it says otherwise."""

import pytest
import torch

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.devices import place_servers, visible


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(4)`: a machine with four."""

    def set_count(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return set_count


def placed(trainer, colocated=False, **settings):
    return place_servers(VLLMConfig(device="cuda", **settings), trainer, colocated=colocated).devices


@pytest.mark.parametrize(
    ("trainer", "settings", "devices"),
    [
        ([0], {}, (1,)),
        ([0], {"num_servers": 3}, (1, 2, 3)),
        ([1, 2], {"devices_per_server": 2}, (0, 3)),
        ([], {"num_servers": 2}, (0, 1)),
        ([0], {"colocated": True}, (0,)),
        ([2], {"colocated": True, "devices_per_server": 2}, (2, 0)),
        ([0], {"num_servers": 2, "devices": (3, 1)}, (3, 1)),
        # a small server beside training on one GPU, on purpose
        ([0], {"devices": (0,), "transport": "shared_memory"}, (0,)),
    ],
)
def test_servers_get_what_the_trainer_leaves(gpus, trainer, settings, devices):
    gpus(4)
    assert placed(trainer, **settings) == devices


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        (
            [0],
            {"num_servers": 4},
            "vllm.num_servers=4 need 4 devices, but beside the trainer's [0] there are 3; lower it, set "
            "rollout.colocated=true, or list vllm.devices to share some",
        ),
        (
            [0, 1],
            {"devices": (1,), "transport": "nccl"},
            "vllm.transport=nccl cannot reach servers on the trainer's own devices [1]; set shared_memory or ipc, or "
            "other vllm.devices",
        ),
        ([0], {"devices": (4,)}, "vllm.devices=[4] are not among the 4 that this process sees; list others"),
    ],
)
def test_what_cannot_be_placed_is_one_line(gpus, trainer, settings, message):
    gpus(4)
    with pytest.raises(ConfigError) as caught:
        placed(trainer, **settings)
    assert str(caught.value) == message


def test_nothing_is_placed_where_there_is_nothing_to_place(gpus):
    gpus(4)
    for config in (VLLMConfig(device="cpu"), VLLMConfig(urls=("http://a:1",))):
        assert place_servers(config, [0], colocated=False) is config
    gpus(0)
    config = VLLMConfig(device="cuda")
    assert place_servers(config, [0], colocated=False) is config


def test_names_for_another_process():
    assert visible([1, 0], "") == ["1", "0"]
    assert visible([1, 0], "7,GPU-abc") == ["GPU-abc", "7"]
    with pytest.raises(ConfigError, match=r"^vllm.devices=\[2\] are not among the 2 that CUDA_VISIBLE_DEVICES names"):
        visible([2], "7,6")
