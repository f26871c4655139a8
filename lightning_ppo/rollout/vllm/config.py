"""Settings of the vLLM engine: frozen dataclasses that check themselves. Nothing here imports vLLM."""

import os
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from lightning_ppo.validation import check_choices, check_count, check_list, check_number, reject, require

Transport = Literal["auto", "shared_memory", "file", "gloo", "nccl", "ipc"]
API_KEY = "VLLM_API_KEY"
"""The environment variable that vLLM takes its key from; never a setting, which would stand in saved configs."""


@dataclass(frozen=True)
class VLLMConfig:
    """Generation by vLLM servers: ours, started and ended with the run, or yours (`urls`).

    Args:
        urls: Servers that you run, for example `http://10.0.0.5:8000`; docs/vllm.md has their command line. They are
            never started, stopped or restarted by us. Those that want an API key get `VLLM_API_KEY` of the environment.
            Empty: we start `num_servers`.
        num_servers: Servers that we start.
        placement: Who starts them: `subprocess` on this machine, or `ray` (one actor per server).
        device: `cpu`, `cuda`, or `auto` (cuda where this machine has it).
        devices_per_server: Devices of each server (its tensor-parallel size).
        devices: Numbers of the devices that servers started here may use, `devices_per_server` each in this order;
            empty means those that the trainer leaves, and with `rollout.colocated` the trainer's own first. A Ray
            cluster assigns devices itself.
        cores: CPU cores that our servers' processes are pinned to, dealt out evenly; empty leaves them free.
        trainer_cores: CPU cores that the trainer is pinned to while the servers run; empty leaves it free.
        trainer_threads: Threads of the trainer's process while the servers run; None leaves torch's setting.
        num_threads: Threads of each server on a CPU.
        dtype: Precision of the servers' weights; only `float32` keeps log-probs equal to the trainer's to 1e-4.
        cpu_weights: How our servers on one CPU keep matrices. `packed`: as they are sent, and where they have a MB or
            are not float32 a copy that is packed for vLLM's kernels, made when it is first used after a refit. `plain`:
            as they are sent, which saves the copy's memory, and makes decode steps of several responses with large
            matrices up to twice as slow. `vllm`: the packed copy only, made in the refit, which takes two to three
            times as long then; so it is on several CPUs and on servers of yours.
        max_num_seqs: Responses that each server generates at once.
        kv_cache_bytes: Memory for keys and values of each server; None means 256 MiB on a CPU, and what
            `gpu_memory_fraction` leaves on a GPU.
        gpu_memory_fraction: Share of the device's memory that a server may use; lower it for colocated generation.
        enforce_eager: Whether to do without compiled graphs; None means on a CPU only.
        extra_arguments: More arguments for `vllm.entrypoints.openai.api_server`.
        environment: More environment variables of the servers.
        transport: How weights get there: `shared_memory` and `ipc` (CUDA, trainer and server on one device) on the same
            host, `gloo` and `nccl` (GPUs) through a process group, `file` through a folder that all hosts share. `auto`
            is shared memory for our servers on this machine; for yours, and elsewhere, file, gloo or nccl.
        transfer_folder: Shared folder of the `file` transport.
        bucket_bytes: Weights travel in pieces of at most about this size.
        group_host: Address of this machine for `gloo` and `nccl`, as the servers see it; `auto` finds it out.
        start_timeout_s: Deadline for a server to come up.
        update_timeout_s: Deadline for a server to confirm new weights.
        request_timeout_s: Deadline of one response; None leaves it to `timeout_s` of the rollouts.
        fingerprint_tolerance: After every refit each server answers a probe, whose log-probs the trainer checks: the
            largest difference allowed. None means 1e-3 for float32 and 0.5 for lower precision.
        probe_interval_s: Seconds between two health probes of a server.
        probe_timeout_s: Deadline of a health probe.
        quarantine_after: Failed probes in a row after which a server gets no more requests.
        trust_after: Successful probes in a row after which it gets requests again.
        max_restarts: Restarts of servers over the whole run. After that the run goes on with those that are left, and
            fails when none is.
    """

    urls: tuple[str, ...] = ()
    num_servers: int = 1
    placement: Literal["subprocess", "ray"] = "subprocess"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices_per_server: int = 1
    devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    trainer_cores: tuple[int, ...] = ()
    trainer_threads: int | None = 1
    num_threads: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    cpu_weights: Literal["packed", "plain", "vllm"] = "packed"
    max_num_seqs: int = 64
    kv_cache_bytes: int | None = None
    gpu_memory_fraction: float = 0.9
    enforce_eager: bool | None = None
    extra_arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    transport: Transport = "auto"
    transfer_folder: str | None = None
    bucket_bytes: int = 256 * 1024 * 1024
    group_host: str = "127.0.0.1"
    start_timeout_s: float = 300.0
    update_timeout_s: float = 120.0
    request_timeout_s: float | None = None
    fingerprint_tolerance: float | None = None
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    quarantine_after: int = 3
    trust_after: int = 2
    max_restarts: int = 5

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self, "vllm.")
        for name, kind in (
            ("urls", str),
            ("extra_arguments", str),
            ("devices", int),
            ("cores", int),
            ("trainer_cores", int),
        ):
            check_list(f"vllm.{name}", getattr(self, name), kind)
        given = self.environment
        ok = isinstance(given, dict) and all(isinstance(text, str) for pair in given.items() for text in pair)
        require(ok, "vllm.environment", given, "is no dict of texts", 'set one, for example {"NAME": "1"}')
        # once, for everything that appends a path; a double slash is another path to most servers
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        self._check_urls()
        for name in (
            "num_servers",
            "devices_per_server",
            "num_threads",
            "max_num_seqs",
            "bucket_bytes",
            "quarantine_after",
            "trust_after",
        ):
            check_count(f"vllm.{name}", getattr(self, name))
        for name in ("trainer_threads", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                check_count(f"vllm.{name}", getattr(self, name))
        check_count("vllm.max_restarts", self.max_restarts, 0)
        for name in ("start_timeout_s", "update_timeout_s", "probe_interval_s", "probe_timeout_s"):
            check_number(f"vllm.{name}", getattr(self, name), 0, open_low=True)
        for name in ("request_timeout_s", "fingerprint_tolerance"):
            if getattr(self, name) is not None:
                check_number(f"vllm.{name}", getattr(self, name), 0, open_low=True)
        check_number("vllm.gpu_memory_fraction", self.gpu_memory_fraction, 0, 1, open_low=True)
        if self.cpu_weights == "plain" and (self.device != "cpu" or self.devices_per_server > 1 or self.urls):
            fix = "set vllm.device=cpu, vllm.devices_per_server=1 and no vllm.urls"
            raise reject("vllm.cpu_weights", "plain", "is for servers on one CPU that are started here", fix)
        if self.devices and len(self.devices) != self.num_devices:
            why, fix = f"are not {self.num_devices}", "list num_servers * devices_per_server"
            raise reject("vllm.devices", self.devices, why, fix)
        for name in ("devices", "cores", "trainer_cores"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"vllm.{name}", values, "names one twice", "name each once")
            for value in values:
                check_count(f"vllm.{name}", value, 0)
        if self.transport == "file" and self.transfer_folder is None:
            raise reject("vllm.transport", "file", "needs a place for the file", "set vllm.transfer_folder")

    def _check_urls(self) -> None:
        for url in self.urls:
            require(_is_address(url), "vllm.urls", url, "is no http address of a server", "write http://host:port")
        doubled = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if doubled:
            raise reject("vllm.urls", doubled[0], "is there twice", "name every server once")
        if self.urls and self.placement == "ray":
            raise reject("vllm.placement", "ray", "cannot place the servers of vllm.urls", "drop one of the two")
        if self.urls and self.num_servers not in (1, len(self.urls)):
            raise reject("vllm.num_servers", self.num_servers, f"is not the {len(self.urls)} of vllm.urls", "drop it")

    @property
    def is_external(self) -> bool:
        """Whether the servers are the user's."""
        return bool(self.urls)

    @property
    def api_key(self) -> str | None:
        """What servers want as bearer token; servers that we start take it from the same variable."""
        return self.environment.get(API_KEY) or os.environ.get(API_KEY) or None

    @property
    def num_devices(self) -> int:
        """Devices of all servers together."""
        return max(self.num_servers, len(self.urls)) * self.devices_per_server

    @property
    def tolerance(self) -> float:
        """Largest difference of a probe's log-probs between a server and the trainer."""
        if self.fingerprint_tolerance is not None:
            return self.fingerprint_tolerance
        return 1e-3 if self.dtype == "float32" else 0.5


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # reading the port checks it
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
