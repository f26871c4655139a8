"""Starts vLLM servers through Ray: one placement group for all, one actor for each."""

import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.ray.resources import check_fits, server_resources
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.server import RayServer
from lightning_ppo.rollout.ray.server_host import HostedServer, ServerHost
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.launch import Command, close_all, deal_cores

# Ray ends an actor's children with the actor, with SIGKILL. The guard must outlive it to end the server.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
# `wait_end` takes one for as long as the server lives.
_THREADS = 8


class RayLauncher:
    """Starts servers in Ray actors; see `lightning_ppo.rollout.vllm.launch.Launcher`.

    The resources of all servers are reserved together at the first launch and kept until `close`, so that a server that
    died comes back in its place.
    """

    def __init__(
        self,
        runtime: RayRuntime,
        config: VLLMConfig,
        command: Command,
        log_folder: Path | None = None,
        *,
        on_gpus: bool,
    ) -> None:
        """Nothing is started yet.

        Args:
            runtime: Ray, started. The launcher does not close it.
            config: `num_servers`, `devices_per_server`, `device`, `cores`, `start_timeout_s`. Cores are dealt
                out as if all servers were on one node.
            command: How a server is started. It is pickled, and called in the actor, in the environment of the node;
                Ray has set `CUDA_VISIBLE_DEVICES` there if the server reserves GPUs.
            log_folder: Folder on the servers' nodes for `server_0.log` and so on; None keeps the logs in temporary
                files without names.
            on_gpus: Whether the servers compute on GPUs.

        Raises:
            ConfigError: the cluster could not hold the servers even if nobody else used it.
            EngineError: `command` cannot be pickled.
        """
        gpus = runtime.config.num_gpus_per_server
        if gpus is None:
            gpus = float(config.devices_per_server) if on_gpus else 0.0
        self._need = server_resources(runtime.config, gpus)
        self._hides_gpus = gpus == 0 and config.device != "cuda"
        strategy = runtime.config.placement_strategy
        check_fits("vllm.num_servers", config.num_servers, self._need, runtime.nodes(), strategy)
        self._runtime = runtime
        self._config = config
        self._command = _pickle(command)
        self._log_folder = log_folder
        self._lock = threading.Lock()
        self._servers: dict[int, RayServer] = {}
        self._group: Any = None
        self._closed = False

    def launch(self, index: int) -> RayServer:
        """Start server number `index` and return at once; the server's `url` waits until Ray has placed it.

        Raises:
            EngineError: the launcher is closed, or Ray is gone.
        """
        name = f"server_{index}"
        with self._lock:
            earlier = self._servers.pop(index, None)
        if earlier is not None:
            # Its actor still has the place.
            earlier.close()
        with self._lock:
            if self._closed:
                raise EngineError(f"vLLM {name} cannot start: its launcher is closed")
            if not self._runtime.is_running:
                raise EngineError(f"vLLM {name} cannot start: Ray is shut down")
            self._servers[index] = server = self._start(index, name)
            return server

    def close(self) -> None:
        """Close every server that was started here, all at the same time, and free what was reserved."""
        import ray

        with self._lock:
            self._closed = True
            servers, self._servers = list(self._servers.values()), {}
            group, self._group = self._group, None
        close_all(servers)
        if group is not None and self._runtime.is_running:
            ray.util.remove_placement_group(group)

    def _start(self, index: int, name: str) -> RayServer:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._config
        if self._group is None:
            bundles = [dict(self._need) for _ in range(config.num_servers)]
            self._group = ray.util.placement_group(bundles, strategy=self._runtime.config.placement_strategy)
        others = {name: amount for name, amount in self._need.items() if name not in ("CPU", "GPU")}
        options: dict[str, Any] = {
            "num_cpus": self._need.get("CPU", 0),
            "num_gpus": self._need.get("GPU", 0),
            "resources": others,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
            "max_concurrency": _THREADS,
            "max_restarts": 0,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        }
        what = HostedServer(
            index,
            name,
            self._command,
            deal_cores(config.cores, config.num_servers, index),
            None if self._log_folder is None else self._log_folder / f"{name}.log",
            self._hides_gpus,
        )
        actor = ray.remote(ServerHost).options(**options).remote(what)
        return RayServer(name, actor, self._runtime, config.start_timeout_s, self._need, what.log_path)


def _pickle(command: Command) -> bytes:
    cloudpickle: Any = import_module("ray.cloudpickle")
    try:
        return cloudpickle.dumps(command)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise EngineError(f"how vLLM servers are started cannot be sent to Ray ({why})") from error
