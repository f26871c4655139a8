"""Names under which a PPO step's update statistics are logged."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from lightning_ppo.config import PPOConfig
from lightning_ppo.updates.critic_update import CriticStats
from lightning_ppo.updates.policy_update import PolicyStats

_OF_AN_UPDATE = ("grad_norm", "num_tokens", "num_sequences")
_OF_THE_SAMPLER = ("sampler_mismatch_kl", "sampler_mismatch_max", "token_mult_prob_error")


def policy_metrics(epochs: Sequence[Sequence[PolicyStats]], ppo: PPOConfig) -> dict[str, float]:
    """Name the statistics of a step's policy updates.

    Args:
        epochs: One sequence per epoch, one entry per update that was made.
        ppo: Tells what the loss is averaged over, and what the engine's log-probs are compared with.

    Returns:
        Means over the trained tokens of all updates (`policy/loss` with `loss_level: sequence`: over their rows),
        maxima of `_max`, and means over updates of what belongs to an update; none without an update.
    """
    stats = tuple(chain.from_iterable(epochs))
    if not stats:
        return {}
    # log-probs from before the first update are compared in every minibatch; others have moved after the first one
    before = epochs[0] if ppo.old_logprobs == "recompute" else epochs[0][:1]
    metrics = {}
    for name in (field.name for field in fields(PolicyStats)):
        is_of_sampler = name in _OF_THE_SAMPLER
        chosen = before if is_of_sampler else stats
        weight = "num_sequences" if name == "loss" and ppo.loss_level == "sequence" else "num_tokens"
        key = f"{'rollout' if is_of_sampler else 'policy'}/{name}"
        metrics[key] = _largest(name, chosen) if name.endswith("_max") else _mean(name, chosen, weight)
    return metrics


def critic_metrics(epochs: Sequence[Sequence[CriticStats]]) -> dict[str, float]:
    """Name the statistics of the critic's first and last pass: means over trained tokens; norms: over updates made."""
    metrics = {}
    for suffix, epoch in (("", epochs[:1]), ("_last_epoch", epochs[-1:])):
        stats = [entry for entry in chain.from_iterable(epoch) if entry.num_tokens]
        if stats:
            for name in ("loss", "grad_norm", "clip_fraction"):
                metrics[f"critic/{name}{suffix}"] = _mean(name, stats, "num_tokens")
    return metrics


def _largest(name: str, stats: Sequence[Any]) -> float:
    return max(float(getattr(entry, name)) for entry in stats)


def _mean(name: str, stats: Sequence[Any], weight: str) -> float:
    weights = [1 if name in _OF_AN_UPDATE else int(getattr(entry, weight)) for entry in stats]
    # so that one update's number is logged as it is, and not as a product divided again
    if len(stats) == 1:
        return float(getattr(stats[0], name))
    return sum(w * float(getattr(entry, name)) for w, entry in zip(weights, stats, strict=True)) / sum(weights)
