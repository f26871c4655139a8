"""From one scalar per response to one reward per token."""

from torch import Tensor

from lightning_ppo.algorithms.masking import require_same_shape, zero_masked


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Place each row's scalar reward on its last valid token and charge the KL penalty on every valid token.

    Args:
        rewards: `[B]` floating point, the scalar reward of each row.
        mask: `[B, T]` bool, True where the token is trained.
        kl: `[B, T]` KL estimate of each token; may hold anything where the mask is False. Not modified.
        kl_coef: Weight of the KL penalty; 0 ignores `kl`.

    Returns:
        `[B, T]`, 0 at masked positions. A row without a valid token gets nothing, not even its scalar.

    Raises:
        ValueError: `kl_coef` is not 0 but `kl` is None, `kl` and `mask` differ in shape, or `rewards` is not `[B]`.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback"
    (arXiv:2203.02155), equation 2, with the penalty spread over the tokens it is a sum of.
    """
    require_same_shape(mask.any(1), rewards=rewards)
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    placed = zero_masked(rewards.unsqueeze(1), is_last)
    if kl_coef == 0.0:
        return placed
    if kl is None:
        raise ValueError(f"kl_coef={kl_coef} has no KL to weigh; pass kl, or set kl_coef to 0")
    require_same_shape(mask, kl=kl)
    return placed - kl_coef * zero_masked(kl, mask)
