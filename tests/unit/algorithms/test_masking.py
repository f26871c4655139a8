import math

import pytest
import torch

from lightning_ppo.algorithms import masked_mean, masked_sum, ratio_or_nan, zero_masked
from lightning_ppo.algorithms.masking import require_same_shape

MASK = torch.tensor([[True, False, True], [False, False, False]])
POISON = [math.nan, math.inf, -math.inf, 1e38]


@pytest.mark.parametrize("poison", POISON)
def test_masked_positions_have_no_value_and_no_gradient(poison):
    """Pitfall 47: NaN times 0 at masked positions."""
    x = torch.tensor([[1.0, poison, 3.0], [poison] * 3], requires_grad=True)
    torch.testing.assert_close(zero_masked(x, MASK), torch.tensor([[1.0, 0.0, 3.0], [0.0] * 3]))
    assert masked_sum(x, MASK).item() == 4.0
    assert masked_sum(x, MASK, dim=1).tolist() == [4.0, 0.0]
    assert masked_mean(x, MASK).item() == 2.0
    assert masked_mean(x, MASK, dim=1).tolist() == [2.0, 0.0]
    masked_mean(x, MASK, dim=1).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.0, 0.5], [0.0] * 3]


def test_mean_over_columns():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[True, False], [True, False]])
    assert masked_mean(x, mask, dim=0).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("width", [0, 3])
def test_mean_of_nothing_is_zero_with_zero_gradient(width):
    """Pitfall 44: the average of a fully masked row is NaN. In a loss it is 0; in a log it is NaN on purpose."""
    x = torch.full((2, width), math.nan, requires_grad=True)
    mask = torch.zeros(2, width, dtype=torch.bool)
    mean = masked_mean(x, mask)
    mean.backward()
    assert mean.item() == 0.0
    assert x.grad.eq(0).all()
    assert math.isnan(ratio_or_nan(masked_sum(x, mask), mask.sum()))


def test_inputs_are_not_modified():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    before, mask_before = x.clone(), MASK.clone()
    masked_mean(x, MASK, dim=1)
    zero_masked(x, MASK)
    assert torch.equal(x, before)
    assert torch.equal(MASK, mask_before)


def test_a_tensor_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"^values\.shape=\(2, 1\) does not fit .*\(2, 3\)$"):
        require_same_shape(MASK, rewards=torch.zeros(2, 3), values=torch.zeros(2, 1))
