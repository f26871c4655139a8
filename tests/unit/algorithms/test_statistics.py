import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import ExplainedVariance, Moments, ratio_or_nan, token_entropy, value_loss

QUICK = settings(max_examples=60, deadline=None, database=None)


def test_entropy_of_known_distributions():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(token_entropy(logits), torch.tensor([math.log(4), 0.0], dtype=torch.float64))


def test_entropy_and_gradient_with_excluded_tokens():
    """Pitfall 47's kind: 0 * log 0 must be 0, in the value and in the gradient."""
    logits = torch.tensor([0.3, -math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    token_entropy(logits).backward()
    small = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    token_entropy(small).backward()
    torch.testing.assert_close(token_entropy(logits), token_entropy(small))
    torch.testing.assert_close(logits.grad[[0, 2]], small.grad)
    assert logits.grad[1].item() == 0.0


def test_entropy_gradient_by_finite_differences():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(token_entropy, (logits,))


def test_entropy_of_half_precision_is_computed_in_float32():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = token_entropy(logits)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, token_entropy(logits.float()), rtol=0, atol=0)


def test_a_mean_of_nothing_is_nan():
    """Pitfall 22: metrics crash when every sample is masked or aborted."""
    assert math.isnan(ratio_or_nan(0.0, 0))
    assert math.isnan(ratio_or_nan(torch.tensor(0.0), torch.tensor(0)))
    assert ratio_or_nan(torch.tensor(3.0), 4) == 0.75
    nothing = ExplainedVariance.of(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3).bool())
    assert nothing == ExplainedVariance()
    assert nothing.value == 0.0


def test_token_weighted_metrics_are_divided_once():
    """Pitfall 34: metrics averaged over ranks without their token counts. Two ranks with 1 and 9 tokens."""
    totals, counts = [2.0, 27.0], [1, 9]
    assert ratio_or_nan(sum(totals), sum(counts)) == 2.9
    assert sum(map(ratio_or_nan, totals, counts)) / 2 != 2.9


@QUICK
@given(st.integers(0, 2**31), st.integers(0, 30))
def test_pooled_over_unequal_shards(seed, cut):
    """Pitfall 19: explained variance averaged over ranks or micro-batches instead of pooled."""
    generator = torch.Generator().manual_seed(seed)
    returns, noise = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    values, mask = returns + 0.5 * noise, torch.rand(30, 4, generator=generator) < 0.7
    whole = ExplainedVariance.of(values, returns, mask)
    first = ExplainedVariance.of(values[:cut], returns[:cut], mask[:cut])
    second = ExplainedVariance.of(values[cut:], returns[cut:], mask[cut:])
    kept, residuals = returns[mask], (returns - values)[mask]
    expected = 1 - residuals.var(unbiased=False) / kept.var(unbiased=False)
    assert whole.value == pytest.approx(expected.item(), rel=1e-10)
    assert first.merge(second).value == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_masked_positions_have_no_influence(poison):
    returns, values = torch.tensor([[1.0, 2.0, poison]]), torch.tensor([[1.0, 1.0, poison]])
    got = ExplainedVariance.of(values, returns, torch.tensor([[True, True, False]]))
    assert got.value == pytest.approx(0.0, abs=1e-12)
    assert got.returns.count == 2


def test_golden_values():
    """Golden row 'EV': moments with Var(residual) / Var(returns) = 1/4 give 0.75; a constant residual explains all."""
    assert ExplainedVariance(Moments(8, 1.0, 4.0), Moments(8, 0.3, 1.0)).value == 0.75
    returns = torch.tensor([[0.0, 1.0, 2.0]])
    assert ExplainedVariance.of(returns - 5, returns, torch.ones(1, 3).bool()).value == 1.0


@pytest.mark.parametrize("returns", [[[1.0]], [[1.0, 1.0]], [[1.0, 1.0001]]])
def test_undefined_without_two_tokens_or_variance(returns):
    returns = torch.tensor(returns)
    assert ExplainedVariance.of(returns + 1, returns, torch.ones_like(returns).bool()).value == 0.0


def test_before_the_update_a_critic_of_noise_explains_nothing():
    """Pitfall 20: with several critic epochs the logged number describes an already fitted critic."""
    generator = torch.Generator().manual_seed(0)
    features, returns = torch.randn(1, 40, 30, generator=generator), torch.randn(1, 40, generator=generator)
    mask, weight = torch.ones(1, 40).bool(), torch.zeros(30, requires_grad=True)
    old_values = (features @ weight).detach()
    before = ExplainedVariance.of(old_values, returns, mask)
    for _ in range(4):
        loss = value_loss(features @ weight, old_values, returns, mask).loss / 40
        (grad,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.5 * grad).detach().requires_grad_()
    after = ExplainedVariance.of(features @ weight, returns, mask)
    assert before.value == pytest.approx(0.0, abs=1e-6)
    assert after.value > 0.3


def test_survives_packing():
    got = ExplainedVariance.of(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 4.0]]), torch.ones(1, 2).bool())
    assert got.to_tensor().shape == (6,)
    assert ExplainedVariance.from_tensor(got.to_tensor()) == got


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match=r"^values\.shape="):
        ExplainedVariance.of(torch.ones(2, 1), torch.ones(2, 3), torch.ones(2, 3).bool())
