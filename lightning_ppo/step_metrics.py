"""Names under which a PPO step's update statistics are logged."""

from dataclasses import asdict

from lightning_ppo.updates.critic_update import CriticStats
from lightning_ppo.updates.policy_update import PolicyStats


def policy_metrics(stats: tuple[PolicyStats, ...]) -> dict[str, float]:
    """Name the statistics of a step's policy updates: means over them, maxima of `_max`; none without an update."""
    if not stats:
        return {}
    metrics = {}
    for name in asdict(stats[0]):
        if name.startswith("sampler_mismatch") or name == "token_mult_prob_error":
            # that of the first update: later ones compare with an older sampler by design
            metrics[f"rollout/{name}"] = float(getattr(stats[0], name))
        elif name.endswith("_max"):
            metrics[f"policy/{name}"] = max(float(getattr(entry, name)) for entry in stats)
        else:
            metrics[f"policy/{name}"] = sum(float(getattr(entry, name)) for entry in stats) / len(stats)
    return metrics


def critic_metrics(epochs: tuple[tuple[CriticStats, ...], ...]) -> dict[str, float]:
    """Name the statistics of the critic's first and last pass: means over their optimizer steps."""
    if not epochs or not epochs[0]:
        return {}
    metrics = {}
    for suffix, stats in (("", epochs[0]), ("_last_epoch", epochs[-1])):
        for name in ("loss", "grad_norm", "clip_fraction"):
            metrics[f"critic/{name}{suffix}"] = sum(float(getattr(entry, name)) for entry in stats) / len(stats)
    return metrics
