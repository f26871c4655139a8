"""Which way weights take, from the settings."""

import socket
from pathlib import Path

import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.ipc_transport import IPCTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport
from lightning_ppo.refit.transport import WeightTransport
from lightning_ppo.rollout.vllm.config import Transport, VLLMConfig
from lightning_ppo.rollout.vllm.devices import uses_cuda


def choose_transport(config: VLLMConfig, *, is_here: bool) -> Transport:
    """What `transport=auto` means; any other setting is kept.

    Args:
        config: Settings.
        is_here: Whether all servers run on this machine.
    """
    if config.transport != "auto":
        return config.transport
    if is_here:
        return "shared_memory"
    if config.transfer_folder is not None:
        return "file"
    return "nccl" if uses_cuda(config) else "gloo"


def make_transport(config: VLLMConfig, *, is_here: bool) -> WeightTransport:
    """Make the transport; nothing is opened yet.

    Args:
        config: Settings.
        is_here: Whether all servers run on this machine.

    Raises:
        EngineError: it cannot work on this machine.
    """
    kind = choose_transport(config, is_here=is_here)
    if kind == "file":
        return FileTransport(Path(config.transfer_folder or "."))
    if kind == "ipc":
        numbers = config.devices or range(min(torch.cuda.device_count(), config.num_devices))
        return IPCTransport([torch.device("cuda", number) for number in numbers], config.bucket_bytes)
    if kind == "gloo":
        return GroupTransport("gloo", _address(config.group_host), config.update_timeout_s)
    if kind == "nccl":
        # of this thread: that of a restarted server, which sends it weights, has another current device
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        return GroupTransport("nccl", _address(config.group_host), config.update_timeout_s, device)
    return SharedMemoryTransport()


def _address(host: str) -> str:
    if host != "auto":
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # nothing is sent: connecting only picks the interface that leads outside
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"group_host=auto finds no address ({error}); set this machine's address") from error
