"""Settings of Ray: a frozen dataclass that checks itself. Nothing here imports Ray."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_ppo.validation import check_choices, check_count, check_kind, check_number


@dataclass(frozen=True)
class RayConfig:
    """Where Ray places what it runs for us: one actor per vLLM server, and reward workers.

    Args:
        address: Address of a running cluster, or `auto`; None starts a local Ray on this machine's loopback, without
            dashboard, and stops it at the end of the run.
        num_cpus_per_server: CPUs reserved for each server.
        num_gpus_per_server: GPUs reserved for each server; None means `devices_per_server` on GPUs, 0 on a CPU.
        resources_per_server: Custom resources reserved for each server.
        placement_strategy: How the servers' placement group spreads over nodes.
        num_cpus_per_reward_worker: CPUs reserved for each reward worker.
        local_object_store_bytes: Object store of a local Ray.
    """

    address: str | None = None
    num_cpus_per_server: float = 1.0
    num_gpus_per_server: float | None = None
    resources_per_server: dict[str, float] = field(default_factory=dict)
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    num_cpus_per_reward_worker: float = 0.5
    local_object_store_bytes: int = 200_000_000

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self, "ray.")
        for name in ("num_cpus_per_server", "num_cpus_per_reward_worker"):
            check_number(f"ray.{name}", getattr(self, name), 0)
        if self.num_gpus_per_server is not None:
            check_number("ray.num_gpus_per_server", self.num_gpus_per_server, 0)
        check_kind("ray.resources_per_server", self.resources_per_server, dict)
        for name, amount in self.resources_per_server.items():
            check_number(f"ray.resources_per_server.{name}", amount, 0, open_low=True)
        # Ray refuses less than this
        check_count("ray.local_object_store_bytes", self.local_object_store_bytes, 78_643_200)
