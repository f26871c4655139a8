"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, as a penalty and as a loss."""

from typing import Literal

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import require_same_shape, zero_masked

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: KLKind,
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """Estimate KL(policy || reference) per token, for tokens that the policy sampled.

    With d = ref_logprobs - logprobs: k1 = -d (unbiased, signed), k2 = d^2 / 2 (biased), k3 = exp(d) - 1 - d
    (unbiased, non-negative). No position is masked here.

    Args:
        logprobs: Log-probs of the sampled tokens under the policy, any shape.
        ref_logprobs: The same under the reference policy, same shape.
        kind: The estimator.
        input_clamp: Limits d to +- this; None leaves it.
        output_clamp: Limits the result to +- this; None leaves it.

    Returns:
        Same shape. Differentiable, but its gradient is *not* that of the KL: see `kl_loss_terms`.

    Raises:
        ValueError: unknown `kind`, or the shapes differ.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html).
    """
    require_same_shape(logprobs, ref_logprobs=ref_logprobs)
    return _clamp(_estimator(ref_logprobs - logprobs, kind, input_clamp), output_clamp)


def kl_loss_terms(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kind: KLKind,
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """Return per-token terms whose expected value *and* gradient are those of the KL estimate, for use in the loss.

    Tokens are sampled from the policy, so its gradient has a part that the estimator alone misses: the change of the
    sampling probabilities. The factor exp(logprobs - logprobs.detach()) has value 1 and adds it: for k3 the gradient
    with respect to logprobs is k3 + 1 - exp(d). Where the input clamp bites, the term is constant: gradient 0. The
    output clamp comes after the factor, so that the gradient is 0 where it bites, too.

    Args:
        logprobs: `[B, T]` with gradient.
        ref_logprobs: `[B, T]`, treated as constant.
        mask: `[B, T]` bool.
        kind: The estimator.
        input_clamp: Limits ref_logprobs - logprobs to +- this; None leaves it.
        output_clamp: Limits each term to +- this; None leaves it.

    Returns:
        `[B, T]`, exactly 0 with gradient 0 at masked positions. Not normalised: aggregate it like the policy loss.

    Raises:
        ValueError: unknown `kind`, or the shapes differ.

    Source: Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477);
    Schulman 2020, "Approximating KL Divergence".
    """
    require_same_shape(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    current = zero_masked(logprobs, mask)
    log_ratio = zero_masked(ref_logprobs.detach(), mask) - current
    if input_clamp is None:
        score = current
    else:
        # Selecting before the exponential: a log-prob of -inf would turn exp(x - x) into NaN.
        score = torch.where(log_ratio.detach().abs() > input_clamp, current.new_zeros(()), current)
    factor = torch.exp(score - score.detach())
    return _clamp(factor * _estimator(log_ratio, kind, input_clamp), output_clamp)


def _estimator(log_ratio: Tensor, kind: KLKind, input_clamp: float | None) -> Tensor:
    difference = _clamp(log_ratio, input_clamp)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return torch.expm1(difference) - difference
    raise ValueError(f"kind={kind} is unknown; choose one of k1, k2, k3")


def _clamp(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)
