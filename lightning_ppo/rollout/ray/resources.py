"""What is asked of a cluster, and whether it can ever have it: arithmetic only."""

import math
from collections.abc import Mapping, Sequence

from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.validation import reject

Resources = Mapping[str, float]
"""Amounts by Ray's names, for example `{"CPU": 4.0, "GPU": 1.0}`."""

_SLACK = 1e-6
# Ray counts to four decimal places


def cpus_needed(config: RayConfig, num_servers: int, reward_workers: int) -> float:
    """CPUs that all servers and reward workers reserve together."""
    return num_servers * config.num_cpus_per_server + reward_workers * config.num_cpus_per_reward_worker


def server_resources(config: RayConfig, num_gpus: float) -> dict[str, float]:
    """What one server reserves; amounts of zero are left out.

    Raises:
        ConfigError: that is nothing.
    """
    wanted = {"CPU": config.num_cpus_per_server, "GPU": num_gpus, **config.resources_per_server}
    found = {name: float(amount) for name, amount in wanted.items() if amount > 0}
    if not found:
        raise reject("ray.num_cpus_per_server", 0, "leaves servers that reserve nothing", "set more than 0")
    return found


def count_fitting(need: Resources, node: Resources) -> int | None:
    """How many times `need` fits into one node; None for as often as one likes."""
    counts = [math.floor(node.get(name, 0.0) / amount + _SLACK) for name, amount in need.items() if amount > 0]
    return min(counts) if counts else None


def check_fits(
    field: str, count: int, need: Resources, nodes: Sequence[Resources], strategy: str = "PACK", instead: str = ""
) -> None:
    """Return if the cluster could hold all of it when nobody else used it.

    Args:
        field: The setting that asks for `count`, for the message.
        count: How many are wanted.
        need: What each reserves, on one node.
        nodes: All that each node has.
        strategy: Ray's placement strategy.
        instead: What to do, for the message.

    Raises:
        ConfigError: it could not; it says what is asked and what the cluster has.
    """
    fitting = [count_fitting(need, node) for node in nodes]
    if fitting and None in fitting:
        return
    numbers = [number for number in fitting if number is not None]
    if strategy == "STRICT_PACK":
        room = max(numbers, default=0)
    elif strategy == "STRICT_SPREAD":
        room = sum(number > 0 for number in numbers)
    else:
        room = sum(numbers)
    if room < count:
        rule = f" with placement_strategy={strategy}" if strategy.startswith("STRICT") else ""
        total = {name: sum(node.get(name, 0.0) for node in nodes) for name in {"CPU", *need}}
        why = f"needs {count} x ({describe(need)}){rule}, but Ray has room for {room}: {describe(total)}"
        where = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        raise reject(field, count, f"{why} on {where}", instead or "lower it, or add nodes to the cluster")


def describe(resources: Resources) -> str:
    """Like `2 CPU, 1 GPU`, in the order of the names."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"
