"""Which way weights take, from the settings."""

from pathlib import Path

import torch

from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.ipc_transport import IPCTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport
from lightning_ppo.refit.transport import WeightTransport
from lightning_ppo.rollout.vllm.config import Transport, VLLMConfig
from lightning_ppo.rollout.vllm.server_arguments import uses_cuda


def choose_transport(config: VLLMConfig) -> Transport:
    """What `transport=auto` means here; any other setting is kept."""
    if config.transport != "auto":
        return config.transport
    is_here = not config.is_external and (config.placement == "subprocess" or config.ray.address is None)
    if is_here:
        return "shared_memory"
    if config.transfer_folder is not None:
        return "file"
    return "nccl" if uses_cuda(config) else "gloo"


def make_transport(config: VLLMConfig) -> WeightTransport:
    """Make the transport; nothing is opened yet.

    Raises:
        EngineError: it cannot work on this machine.
    """
    kind = choose_transport(config)
    if kind == "file":
        return FileTransport(Path(config.transfer_folder or "."))
    if kind == "ipc":
        numbers = config.devices or (range(torch.cuda.device_count()) if torch.cuda.is_available() else ())
        return IPCTransport([torch.device("cuda", number) for number in numbers])
    if kind == "gloo":
        return GroupTransport("gloo", config.group_host, config.update_timeout_s)
    if kind == "nccl":
        return GroupTransport("nccl", config.group_host, config.update_timeout_s)
    return SharedMemoryTransport()
