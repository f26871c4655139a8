"""Which GPUs of this machine the servers get that we start here."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.validation import reject


def uses_cuda(config: VLLMConfig) -> bool:
    """Whether the servers that we start run on GPUs."""
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def gpu_numbers(strategy: object) -> list[int]:
    """Numbers of the GPUs of this machine that a Lightning strategy trains on."""
    devices = getattr(strategy, "parallel_devices", None) or ()
    return [device.index for device in devices if device.type == "cuda" and device.index is not None]


def place_servers(config: VLLMConfig, trainer_devices: Sequence[int], *, colocated: bool) -> VLLMConfig:
    """Fill in `vllm.devices`: devices that the trainer leaves free, or, colocated, the trainer's own first.

    Args:
        config: Settings of servers that start on this machine.
        trainer_devices: Numbers of the GPUs that the trainer uses here.
        colocated: Whether generation and training take turns.

    Returns:
        The settings with devices; unchanged on a CPU, for the user's own servers, and where devices are given.

    Raises:
        ConfigError: there are not enough, or not those that are given; or NCCL would have to connect the trainer with a
            server on its own device.
    """
    if config.is_external or not uses_cuda(config) or not torch.cuda.is_available():
        return config
    count = torch.cuda.device_count()
    if max(config.devices, default=-1) >= count:
        why = f"are not among the {count} that this process sees"
        raise reject("vllm.devices", list(config.devices), why, "list others")
    shared = sorted(set(config.devices) & set(trainer_devices))
    if shared and config.transport == "nccl":
        why = f"cannot reach servers on the trainer's own devices {shared}"
        raise reject("vllm.transport", "nccl", why, "set shared_memory or ipc, or other vllm.devices")
    if config.devices:
        return config
    free = [number for number in range(count) if number not in trainer_devices]
    choice = [*trainer_devices, *free] if colocated else free
    if len(choice) < config.num_devices:
        ours = list(trainer_devices)
        why = f"need {config.num_devices} devices, but beside the trainer's {ours} there are {len(free)}"
        fix = "lower it, set rollout.colocated=true, or list vllm.devices to share some"
        raise reject("vllm.num_servers", config.num_servers, why, fix)
    return replace(config, devices=tuple(choice[: config.num_devices]))


def visible(numbers: Sequence[int], variable: str) -> list[str]:
    """Name devices of this process for another one.

    Args:
        numbers: As this process counts them.
        variable: Its CUDA_VISIBLE_DEVICES; empty means all.

    Raises:
        ConfigError: one is not among them.
    """
    names = [name for name in variable.split(",") if name]
    if not names:
        return [str(number) for number in numbers]
    if max(numbers, default=-1) >= len(names):
        why = f"are not among the {len(names)} that CUDA_VISIBLE_DEVICES names"
        raise reject("vllm.devices", list(numbers), why, "list others")
    return [names[number] for number in numbers]
