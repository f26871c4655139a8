"""Masked sums and means. A mask selects (`torch.where`), it never multiplies: NaN times 0 would be NaN."""

import torch
from torch import Tensor


def require_same_shape(like: Tensor, **tensors: Tensor) -> None:
    """Check that every tensor has exactly the shape of `like`, so that nothing is broadcast along a wrong axis.

    Raises:
        ValueError: a tensor's shape differs; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name}.shape={tuple(tensor.shape)} does not fit the other arguments; "
                f"pass a tensor of shape {tuple(like.shape)}"
            )


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` where `mask` is True and 0 elsewhere.

    Args:
        x: Any shape and dtype. NaN and inf at masked positions are allowed; their gradient is exactly 0.
        mask: Bool, broadcastable to `x`.

    Returns:
        A new tensor with the dtype of `x`.
    """
    return torch.where(mask, x, x.new_zeros(()))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum `x` over the positions where `mask` is True, over `dim` or over everything.

    Args:
        x: Any shape.
        mask: Bool, same shape as `x`.
        dim: The dimension to sum over; None sums over all.
    """
    selected = zero_masked(x, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average `x` over the positions where `mask` is True; 0 with zero gradient where there is none.

    Args:
        x: Any shape, floating point.
        mask: Bool, same shape as `x`.
        dim: The dimension to average over; None averages over all.
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)
