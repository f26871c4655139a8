"""The losses of the policy and of the critic. All are sums: the caller divides by counts of the whole PPO step."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import masked_mean, masked_sum, require_same_shape, zero_masked

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the valid tokens (the loss: over tokens or rows) of one micro-batch; all 0-dimensional."""

    loss: Tensor
    """To be divided by the PPO step's valid tokens (level `token`) or valid rows (level `sequence`)."""
    clipped_tokens: Tensor
    """Float64, detached: tokens without gradient because the clip or the dual clip holds their loss."""
    ratio_sum: Tensor
    """Float64, detached: sum of the ratios, before any clip."""
    approx_kl_sum: Tensor
    """Float64, detached: sum of old_logprobs - logprobs, the k1 estimate of KL(old policy || policy)."""


@dataclass(frozen=True)
class ValueLoss:
    """Sums over the valid tokens of one micro-batch; both 0-dimensional."""

    loss: Tensor
    """To be divided by the PPO step's valid tokens."""
    clipped_tokens: Tensor
    """Float64, detached: tokens whose clipped error is strictly larger than the plain one."""


def aggregate(per_token: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Sum per-token terms over a micro-batch, so that sums of micro-batches are the sum of the whole.

    Args:
        per_token: `[B, T]`; masked positions may hold anything.
        mask: `[B, T]` bool.
        level: `token` sums over the valid tokens; `sequence` sums, over the rows, the mean over the row's valid tokens
            (a row without any adds 0).

    Returns:
        0-dimensional. Keeps its graph, with zero gradients, when every position is masked.

    Raises:
        ValueError: unknown `level`, or the shapes differ.
    """
    require_same_shape(mask, per_token=per_token)
    if level == "token":
        return masked_sum(per_token, mask)
    if level == "sequence":
        return masked_mean(per_token, mask, dim=1).sum()
    raise ValueError(f"level={level} is unknown; choose one of token, sequence")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    level: Level = "token",
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Compute the clipped policy loss, max(-A * rho, -A * clip(rho, 1 - eps, 1 + eps_high)), as a sum.

    rho = exp(logprobs - old_logprobs). With dual_clip = c, the loss of a negative advantage is at most c * |A|.
    Where a clip decides, the ratio is replaced by its bound *before* the exponential, so that an overflowing ratio
    which the clip discards leaves a gradient of 0 and not NaN. An overflow that no clip discards (negative advantage,
    no dual clip) stays an infinite loss, for the caller to fail on.

    Args:
        logprobs: `[B, T]` with gradient, float32 or float64.
        old_logprobs: `[B, T]`, the ratio's denominator; treated as constant.
        advantages: `[B, T]`, normalised or not; treated as constant.
        mask: `[B, T]` bool; masked positions may hold anything in every other tensor.
        clip_eps: The ratio counts down to 1 - clip_eps.
        clip_eps_high: The ratio counts up to 1 + clip_eps_high; None means `clip_eps`.
        dual_clip: The bound c above 1; None switches it off.
        level: See `aggregate`.
        weights: `[B, T]` importance weights that multiply each token's loss, treated as constant; None means 1. A token
            of weight 0 adds nothing, whatever its ratio; only a NaN stays one.

    Raises:
        ValueError: `dual_clip` is not above 1, unknown `level`, or the shapes differ.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 7; clip-higher:
    Yu et al. 2025, "DAPO" (arXiv:2503.14476), the section of that name; dual clip: Ye et al. 2020, "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning" (arXiv:1912.09729), the section on dual-clip PPO.
    """
    require_same_shape(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} is out of range; set a number above 1, or None")
    low, high = 1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)

    log_ratio = zero_masked(logprobs, mask) - zero_masked(old_logprobs.detach(), mask)
    advantage = zero_masked(advantages.detach(), mask)
    ratio = log_ratio.detach().exp()
    too_high = (advantage >= 0) & (ratio > high)
    too_low = (advantage < 0) & (ratio < low)
    held = too_high | too_low
    bound = torch.where(too_high, ratio.new_tensor(high), ratio.new_tensor(low))
    if dual_clip is not None:
        too_bad = (advantage < 0) & (ratio > dual_clip)
        held = held | too_bad
        bound = torch.where(too_bad, ratio.new_tensor(dual_clip), bound)
    weight = None
    is_free = ~held
    if weights is not None:
        require_same_shape(mask, weights=weights)
        weight = zero_masked(weights.detach(), mask)
        # 0 times an overflowing ratio would be NaN; a NaN that is there already must stay visible
        is_free = is_free & ((weight != 0) | log_ratio.detach().isnan())
    free_ratio = torch.where(is_free, log_ratio, log_ratio.new_zeros(())).exp()
    per_token = -advantage * torch.where(held, bound, free_ratio)
    if weight is not None:
        per_token = per_token * weight
    return PolicyLoss(
        loss=aggregate(per_token, mask, level),
        clipped_tokens=(held & (advantage != 0)).sum(dtype=torch.float64),
        ratio_sum=masked_sum(ratio.double(), mask),
        approx_kl_sum=-masked_sum(log_ratio.detach().double(), mask),
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_eps: float | None = None,
    scale: float = 1.0,
) -> ValueLoss:
    """Compute the critic's squared error, 0.5 * scale * max((V - R)^2, (V_clipped - R)^2), as a sum over valid tokens.

    V_clipped keeps V within old_values +- clip_eps.

    Args:
        values: `[B, T]` with gradient, value of the state before each token.
        old_values: `[B, T]` the same from before the update; treated as constant.
        returns: `[B, T]` targets; treated as constant.
        mask: `[B, T]` bool; masked positions may hold anything in every other tensor.
        clip_eps: Clip range; None, or a number <= 0, switches the clip off.
        scale: Factor on the loss.

    Raises:
        ValueError: the shapes differ.

    Source: Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients" (arXiv:2005.12729), section 3,
    "value function clipping".
    """
    require_same_shape(mask, values=values, old_values=old_values, returns=returns)
    current, target = zero_masked(values, mask), zero_masked(returns.detach(), mask)
    error = (current - target).square()
    clipped_tokens = torch.zeros((), dtype=torch.float64, device=mask.device)
    if clip_eps is not None and clip_eps > 0:
        old = zero_masked(old_values.detach(), mask)
        clipped_error = (current.clamp(old - clip_eps, old + clip_eps) - target).square()
        is_clipped = clipped_error.detach() > error.detach()
        error = torch.where(is_clipped, clipped_error, error)
        clipped_tokens = is_clipped.sum(dtype=torch.float64)
    return ValueLoss(loss=0.5 * scale * masked_sum(error, mask), clipped_tokens=clipped_tokens)
