"""Generalised advantage estimation over ragged, masked responses, without a Python loop over tokens."""

import torch
from torch import Tensor

from lightning_ppo.algorithms.masking import require_same_shape, zero_masked


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns; masked positions are skipped as if they were not there.

    With t running over the valid tokens of a row only: delta_t = r_t + gamma * V_{t+1} - V_t and
    A_t = delta_t + gamma * lam * A_{t+1}. The value after the last valid token is `bootstrap`. Nothing is
    normalised, nothing carries a gradient.

    Args:
        rewards: `[B, T]` reward of each token.
        values: `[B, T]` value of the state *before* each token, float32 or float64.
        mask: `[B, T]` bool; whatever stands at a masked position has no influence.
        gamma: Discount per valid token.
        lam: GAE lambda, one for all rows or `[B]`.
        bootstrap: `[B]` value of the state after each row's last valid token; None means 0 (the response ended).

    Returns:
        Advantages and returns, both `[B, T]`: returns = advantages + values at valid positions, and both are exactly 0
        at masked ones.

    Raises:
        ValueError: `rewards` or `values` differs from the mask in shape, or `lam` or `bootstrap` is not `[B]`.

    Source: Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv:1506.02438), equation 16; the scan is Hillis and Steele 1986, "Data Parallel Algorithms".
    """
    require_same_shape(mask, rewards=rewards, values=values)
    rows = mask.sum(1)
    if isinstance(lam, Tensor):
        require_same_shape(rows, lam=lam)
    if bootstrap is not None:
        require_same_shape(rows, bootstrap=bootstrap)
    with torch.no_grad():
        valid_values = zero_masked(values, mask)
        deltas, order = _compact_deltas(zero_masked(rewards, mask), valid_values, mask, gamma, bootstrap)
        compact = _discounted_suffix_sums(deltas, gamma * lam)
        advantages = torch.zeros_like(valid_values, dtype=compact.dtype).scatter(1, order, compact)
        return advantages, zero_masked(advantages + valid_values, mask)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return the lambda of each row from its number of valid tokens: 1 - 1 / max(alpha * length, 1).

    Args:
        lengths: `[B]` valid tokens of each row.
        alpha: How fast lambda approaches 1; a row of up to 1 / alpha tokens gets 0.

    Returns:
        `[B]` float64 within [0, 1).

    Source: Yue et al. 2025, "VAPO" (arXiv:2504.05118), the section on length-adaptive GAE.
    """
    return 1.0 - 1.0 / (lengths.double() * alpha).clamp(min=1.0)


def estimate_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    gae_lambda_value: float | None = None,
    gae_lambda_policy: float | None = None,
    length_adaptive_alpha: float = 0.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the policy's advantages and the critic's targets, each with its own lambda.

    The targets use `gae_lambda_value`, or else `gae_lambda`. The advantages use the length-adaptive lambda if
    `length_adaptive_alpha` is above 0, or else `gae_lambda_policy`, or else `gae_lambda`. When the two lambdas differ,
    returns are not advantages + values.

    Args:
        rewards: `[B, T]` reward of each token.
        values: `[B, T]` value of the state before each token.
        mask: `[B, T]` bool.
        gamma: Discount per valid token.
        gae_lambda: Lambda of whatever has none of its own.
        gae_lambda_value: Lambda of the critic's targets.
        gae_lambda_policy: Lambda of the advantages.
        length_adaptive_alpha: Above 0, see `length_adaptive_lambda`.
        bootstrap: `[B]` value of the state after each row's last valid token; None means 0.

    Returns:
        Advantages (not normalised) and returns, both `[B, T]` and 0 at masked positions.

    Raises:
        ValueError: as `gae`.

    Source: Yuan et al. 2025, "What's Behind PPO's Collapse in Long-CoT?" (arXiv:2503.01491), the section on decoupled
    GAE; Yue et al. 2025, "VAPO" (arXiv:2504.05118).
    """
    value_lambda = gae_lambda if gae_lambda_value is None else gae_lambda_value
    policy_lambda: float | Tensor = gae_lambda if gae_lambda_policy is None else gae_lambda_policy
    if length_adaptive_alpha > 0:
        policy_lambda = length_adaptive_lambda(mask.sum(1), length_adaptive_alpha)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=value_lambda, bootstrap=bootstrap)
    if isinstance(policy_lambda, Tensor) or policy_lambda != value_lambda:
        advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=policy_lambda, bootstrap=bootstrap)
    return advantages, returns


def _compact_deltas(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Move each row's valid tokens to the left and return their temporal differences `[B, N]` and origins `[B, N]`."""
    lengths = mask.sum(1, keepdim=True)
    longest = int(lengths.max()) if lengths.numel() else 0
    order = torch.argsort((~mask).byte(), dim=1, stable=True)[:, :longest]
    compact_values = values.gather(1, order)
    following = torch.cat([compact_values[:, 1:], compact_values.new_zeros(len(values), min(longest, 1))], dim=1)
    position = torch.arange(longest, device=mask.device)
    if bootstrap is not None:
        is_last = position == lengths - 1
        following = torch.where(is_last, bootstrap.to(values.dtype).unsqueeze(1), following)
    deltas = rewards.gather(1, order) + gamma * following - compact_values
    return zero_masked(deltas, position < lengths), order


def _discounted_suffix_sums(deltas: Tensor, decay: float | Tensor) -> Tensor:
    """Return sum_{k >= 0} decay^k * delta_{t+k} for each t by doubling: log2(N) additions of whole tensors.

    The powers of the decay are taken in float64: repeated squaring in float32 would multiply their rounding error by
    the length. The additions form a tree, so rounding grows with log(N) and not with N.
    """
    sums = deltas.clone()
    span = 1
    while span < deltas.shape[1]:
        if isinstance(decay, Tensor):
            power: float | Tensor = decay.double().pow(span).to(deltas.dtype).unsqueeze(1)
        else:
            power = decay**span
        reached = sums[:, span:] * power
        sums[:, :-span] += reached
        span *= 2
    return sums
