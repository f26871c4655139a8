"""Importance weights: what a token counts that another policy, or another engine, has sampled."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import masked_mean, masked_sum, require_same_shape, zero_masked

CorrectionKind = Literal["none", "token", "truncated", "sequence", "icepop", "sequence_mask"]


@dataclass(frozen=True)
class ImportanceWeights:
    """The weights of one micro-batch, with sums over its valid tokens; everything is detached."""

    weights: Tensor | None
    """`[B, T]`, 1 at masked positions; None when nothing is corrected (every weight is 1)."""
    weight_sum: Tensor
    """Float64, as are the next four."""
    raw_sum: Tensor
    """Sum of the weights before any bound; one that is not finite adds nothing (it is out of bounds)."""
    raw_max: Tensor
    """The largest of them, 0 for no token."""
    out_of_bounds: Tensor
    """Tokens whose weight, or whose row's criterion, is outside of the bounds or not finite."""
    zeroed: Tensor
    """Tokens whose weight is 0, so that they leave no trace in the gradient."""


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: CorrectionKind,
    *,
    clip_min: float = 0.0,
    clip_max: float = 2.0,
) -> ImportanceWeights:
    """Compute weights that multiply each token's loss, to correct for rollouts from another policy or engine.

    With d_t = old_logprobs - rollout_logprobs at the valid tokens t of a row, and m the mean of d_t over these:

    * `none`: no weights. Bounds are not read.
    * `token`: exp(d_t). Bounds are not read.
    * `truncated`: exp(d_t), clamped to [clip_min, clip_max].
    * `sequence`: exp(m), the geometric mean of the token weights, for every token of the row; clamped likewise. A mean
      over the row's own tokens: exp of the *sum* shrinks or grows exponentially with length on healthy rollouts.
      Its variance does not depend on the length; it is not the (unbiased) ratio of the sequence probabilities.
    * `icepop`: exp(d_t) if that is within [clip_min, clip_max], else 0.
    * `sequence_mask`: exp(d_t) in rows whose exp(m) is within [clip_min, clip_max], else 0.

    A weight depends on its own row only, so that any split of the rows into chunks, micro-batches or ranks gives the
    same weights. They are not normalised: a token of weight 0 still counts in the denominator of the loss (the PPO
    step's valid tokens, or valid rows), and advantages are normalised over all valid tokens before weighting.

    Args:
        old_logprobs: `[B, T]` under the trainer's policy before the update, float32 or float64.
        rollout_logprobs: `[B, T]` as the engine sampled.
        mask: `[B, T]` bool; whatever stands at a masked position (NaN, -inf) has no influence.
        kind: See above.
        clip_min: Lower bound; must be above 0 for `icepop` and `sequence_mask`.
        clip_max: Upper bound.

    Returns:
        The weights and their sums. A valid token whose d_t (`sequence`, `sequence_mask`: m) or exp(d_t) is not finite
        gets weight 0, and is counted as out of bounds, for each kind but `none`.

    Raises:
        ValueError: unknown `kind`, the shapes differ, `clip_min` is above `clip_max`, or it is not above 0 for a kind
            that needs it.

    Source: `token`: Hilton et al. 2021, "Batch size-invariance for policy optimization" (arXiv:2110.00641), the
    decoupled objective. `truncated`: Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561), section 4.1 (rho). `sequence`:
    the length-normalised ratio of Zheng et al. 2025, "GSPO" (arXiv:2507.18071), equation 7. `icepop`: Ling Team 2025,
    "Every Step Evolves" (arXiv:2510.18855), the section on IcePop. `sequence_mask`: the same ratio as a criterion, with
    token weights inside, as in ProRL v2 (described in NVIDIA-NeMo/RL#1899).
    """
    require_same_shape(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    _check_kind(kind, clip_min, clip_max)
    valid = mask.sum(dtype=torch.float64)
    if kind == "none":
        nothing = torch.zeros_like(valid)
        return ImportanceWeights(None, valid, valid, valid.clamp(max=1.0), nothing, nothing)

    log_weights = zero_masked(old_logprobs.detach(), mask) - zero_masked(rollout_logprobs.detach(), mask)
    # float64: the sum over a long row must not depend on the padding behind it
    row_mean = masked_mean(log_weights.double(), mask, dim=1).unsqueeze(1).expand_as(log_weights).to(log_weights.dtype)
    if kind == "sequence":
        log_weights = row_mean
    raw = log_weights.exp()
    is_finite = log_weights.isfinite() & raw.isfinite()
    raw = zero_masked(raw, is_finite)
    is_inside = is_finite
    if kind != "token":
        criterion = row_mean.exp() if kind == "sequence_mask" else raw
        is_inside = is_finite & (criterion >= clip_min) & (criterion <= clip_max)
    if kind in ("truncated", "sequence"):
        used = zero_masked(raw.clamp(clip_min, clip_max), is_finite)
    else:
        used = zero_masked(raw, is_inside)
    raw = zero_masked(raw, mask).double()
    return ImportanceWeights(
        weights=torch.where(mask, used, used.new_ones(())),
        weight_sum=masked_sum(used.double(), mask),
        raw_sum=raw.sum(),
        raw_max=raw.max() if raw.numel() else torch.zeros_like(valid),
        out_of_bounds=(mask & ~is_inside).sum(dtype=torch.float64),
        zeroed=(mask & (used == 0)).sum(dtype=torch.float64),
    )


def _check_kind(kind: str, clip_min: float, clip_max: float) -> None:
    kinds = get_args(CorrectionKind)
    if kind not in kinds:
        raise ValueError(f"kind={kind} is unknown; choose one of {', '.join(kinds)}")
    if kind in ("none", "token"):
        return
    if clip_min > clip_max:
        raise ValueError(f"clip_min={clip_min} is above clip_max={clip_max}; set clip_min <= clip_max")
    if kind in ("icepop", "sequence_mask") and not clip_min > 0:
        raise ValueError(f"clip_min={clip_min} leaves kind={kind} without a lower bound; set a number above 0")
