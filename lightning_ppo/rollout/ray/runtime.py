"""The connection to Ray: a cluster that runs already, or a Ray of our own on this machine's loopback."""

import importlib
import logging
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from lightning_ppo.environment import set_variables
from lightning_ppo.errors import ConfigError, EngineError
from lightning_ppo.rollout.ray import sweeper
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.resources import Resources, describe
from lightning_ppo.validation import reject

LOCAL_HOST = "127.0.0.1"

_LOCAL_ENVIRONMENT = {
    # Ray takes 127.0.0.1 for a node's address with this only; all its sockets are on the loopback then.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # It counts the trainer's memory, and would end servers for it.
    "RAY_memory_monitor_refresh_ms": "0",
    # Under `uv run` Ray would build another environment for its workers.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_RAY_SETS = ("RAY_AUTH_MODE",)
# A token of this process: Ray would write one into the home folder. Ray reads it once per process.
_TOKEN = ("RAY_AUTH_TOKEN", secrets.token_hex(32))

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_REACH_S = 5.0
_SHUTDOWN_S = 30.0
# The paths of Ray's sockets may have 107 characters; all but this many are Ray's own.
_LONGEST_TEMPORARY = 20


class RayRuntime:
    """Ray, started or connected to by `start` and left by `close`. Methods may be called from any thread.

    Ray that this process has initialised itself is used as it is, and never shut down here.
    """

    def __init__(
        self,
        config: RayConfig,
        *,
        num_cpus: float = 0.0,
        gpus: Sequence[str] | None = None,
        start_timeout_s: float = 120.0,
        wanted_by: str = "placement=ray",
    ) -> None:
        """Nothing is started yet. A local Ray will use the CPU cores that this process may use now.

        Args:
            config: `address`, `local_object_store_bytes`.
            num_cpus: CPUs that will be asked for (see `cpus_needed`). A local Ray has as many, and at least those of
                this machine.
            gpus: Names of the GPUs that a local Ray may hand out, as in CUDA_VISIBLE_DEVICES; None means all that it
                finds.
            start_timeout_s: How long Ray may take to start or to answer.
            wanted_by: The setting that asks for Ray, for messages.
        """
        self.config = config
        self._num_cpus = num_cpus
        self._gpus = gpus
        self._start_timeout_s = start_timeout_s
        self._wanted_by = wanted_by
        self._lock = threading.Lock()
        self._ray: Any = None
        self._thread: threading.Thread | None = None
        self._began = threading.Event()
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._folder: str | None = None
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._saved: dict[str, str | None] = {}

    @property
    def is_local(self) -> bool:
        """Whether this is a Ray of our own, on this machine only."""
        return self._folder is not None

    @property
    def is_running(self) -> bool:
        """Whether Ray can be asked for anything."""
        return self._ray is not None and bool(self._ray.is_initialized())

    def start(self) -> None:
        """Start Ray or connect to it; may be called again.

        Raises:
            ConfigError: Ray is not installed, or the address is none.
            EngineError: nothing answers at the address, it is no Ray or another version of it, or Ray did not start in
                time.
        """
        with self._lock:
            if self._ray is not None:
                return
            ray = _import_ray(self._wanted_by)
            if not ray.is_initialized():
                self._init()
            self._ray = ray

    def close(self) -> None:
        """End what `start` started, and nothing else; may be called again."""
        with self._lock:
            if self._thread is not None:
                self._closing.set()
                self._thread.join(_SHUTDOWN_S)
                if self._thread.is_alive():
                    logging.getLogger(__name__).warning("Ray does not shut down within %g s", _SHUTDOWN_S)
            self._ray = self._thread = None
            self._forget()

    def nodes(self) -> list[dict[str, float]]:
        """All that each living node has, whoever uses it."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def describe_free(self, need: Resources) -> str:
        """What the cluster has left of what is needed, like `0.5 CPU, 0 GPU`."""
        free = self._ray.available_resources()
        return describe({name: free.get(name, 0.0) for name in need})

    def _init(self) -> None:
        is_local = self.config.address in (None, "local")
        settings = self._local_settings() if is_local else self._cluster_settings()
        self._began.clear()
        self._closing.clear()
        self._error = None
        # A thread of its own: `ray.init` has no deadline, it would take over SIGTERM, and on Linux the processes that
        # it starts end with the thread that started them.
        self._thread = threading.Thread(target=self._live, args=(settings,), name="ray-runtime", daemon=True)
        self._thread.start()
        in_time = self._began.wait(self._start_timeout_s)
        if in_time and self._error is None:
            return
        error, self._thread = self._error, None
        # Should it still come up, it goes down at once.
        self._closing.set()
        folder, self._folder = self._folder, None
        # The folder is left for who reads the message.
        self._stop_sweeper()
        self._restore_environment()
        why = f"did not within {self._start_timeout_s:g} s" if error is None else _one_line(error)
        if folder is not None:
            raise EngineError(
                f"{self._wanted_by}: Ray did not start: {why}; see {folder}/session_latest/logs"
            ) from error
        raise EngineError(
            f"ray.address={self.config.address} cannot be used: {why}; start Ray there and here, or correct it"
        ) from error

    def _live(self, settings: dict[str, Any]) -> None:
        import ray
        from ray._private import ray_constants

        if self._cores is not None:
            # This thread's only, for what it starts: the trainer may have pinned itself meanwhile.
            os.sched_setaffinity(0, self._cores)
        reaches_out = ray_constants.ENABLE_RAY_CLUSTER
        # what Ray starts now numbers these GPUs; this process goes on with its own
        shown = {} if self._gpus is None or settings["address"] != "local" else {_VISIBLE: ",".join(self._gpus)}
        before = set_variables(shown)
        try:
            if settings["address"] == "local":
                # If Ray was imported before, it has not seen the environment.
                ray_constants.ENABLE_RAY_CLUSTER = False
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
        except (Exception, SystemExit) as error:
            self._error = error
            ray.shutdown()
            return
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = reaches_out
            set_variables(before)
            self._began.set()
        self._closing.wait()
        ray.shutdown(wait_for_processes=True)

    def _local_settings(self) -> dict[str, Any]:
        default = tempfile.gettempdir()
        where = default if len(default) <= _LONGEST_TEMPORARY else "/tmp"
        self._folder = tempfile.mkdtemp(prefix="ppo_ray_", dir=where)
        command = [sys.executable, "-I", "-S", sweeper.__file__, str(os.getpid()), self._folder]
        # Not on our output: who reads that to its end need not wait for this one.
        null = subprocess.DEVNULL
        self._sweeper = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        changes = dict((*_LOCAL_ENVIRONMENT.items(), _TOKEN))
        self._saved = {name: os.environ.get(name) for name in _RAY_SETS} | set_variables(changes)
        return {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, math.ceil(self._num_cpus)),
            "object_store_memory": self.config.local_object_store_bytes,
            "include_dashboard": False,
            "_node_ip_address": LOCAL_HOST,
            "_temp_dir": self._folder,
            **({} if self._gpus is None else {"num_gpus": len(self._gpus)}),
        }

    def _cluster_settings(self) -> dict[str, Any]:
        address = self.config.address or ""
        if "://" in address:
            why = "is no address of a node"
            raise reject("ray.address", address, why, "run the trainer on a node of the cluster and write auto")
        if address != "auto":
            host, colon, port = address.rpartition(":")
            if not (colon and host and port.isdigit()):
                raise reject("ray.address", address, "is no address", "write host:port, or auto")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            except (OSError, OverflowError) as error:
                raise EngineError(
                    f"ray.address={address} does not answer ({_one_line(error)}); start Ray there, or correct it"
                ) from error
        return {"address": address}

    def _forget(self) -> None:
        self._restore_environment()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._stop_sweeper()

    def _stop_sweeper(self) -> None:
        if self._sweeper is not None:
            self._sweeper.kill()
            self._sweeper.wait()
            self._sweeper = None

    def _restore_environment(self) -> None:
        set_variables(self._saved)
        self._saved = {}


def _import_ray(wanted_by: str) -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{wanted_by} needs Ray; install lightning-ppo[ray]") from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    cause = f" ({_one_line(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {text}"[:400] + cause
