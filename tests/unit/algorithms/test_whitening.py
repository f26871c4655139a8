import dataclasses
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import EPSILON, Moments, RunningCentre, apply_whitening, merge_moments, whitening_of

QUICK = settings(max_examples=60, deadline=None, database=None)
NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), max_size=40)


def moments(numbers, dtype=torch.float64):
    x = torch.tensor(numbers, dtype=dtype)
    return Moments.of(x, torch.ones_like(x, dtype=torch.bool))


def whiten(x, mask, centre=None):
    return apply_whitening(x, mask, *whitening_of(Moments.of(x, mask), centre))


@QUICK
@given(NUMBERS, st.lists(st.integers(0, 40), max_size=4))
def test_merged_chunks_are_the_whole(numbers, cuts):
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    parts = [moments(numbers[a:b]) for a, b in itertools.pairwise(edges)]
    whole, merged = moments(numbers), merge_moments(parts)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, rel=1e-12, abs=1e-10)
    assert merged.m2 == pytest.approx(whole.m2, rel=1e-11, abs=1e-9)


@QUICK
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=40), st.floats(-100, 100))
def test_agrees_with_torch(numbers, centre):
    x = torch.tensor(numbers, dtype=torch.float64)
    got = moments(numbers)
    assert got.mean == pytest.approx(x.mean().item(), rel=1e-12, abs=1e-10)
    assert got.variance == pytest.approx(x.var(unbiased=True).item(), rel=1e-11, abs=1e-9)
    assert got.square_about(centre) == pytest.approx((x - centre).square().sum().item(), rel=1e-11, abs=1e-9)


def test_no_cancellation_far_from_zero():
    got = merge_moments([moments([1e8 + 1, 1e8 + 2]), moments([1e8 + 3])])
    assert got.m2 == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0.1, -1 / 3, 1e-30, 12345.678])
def test_equal_numbers_have_exactly_no_deviation(number, dtype):
    parts = [moments([number] * n, dtype) for n in (3, 7, 1, 110)]
    merged = merge_moments(Moments.from_tensor(part.to_tensor()) for part in parts)
    assert merged.m2 == 0.0
    assert merged.mean == torch.tensor(number, dtype=dtype).item()
    centre, scale = whitening_of(merged)
    assert scale == 0.0
    x = torch.full((1, 5), number, dtype=dtype)
    assert apply_whitening(x, torch.ones(1, 5).bool(), centre, scale).eq(0).all()


def test_deviation_below_float32_resolution_counts_as_none():
    rounding = moments([0.7, 0.7 + 3e-8, 0.7 - 3e-8])
    assert whitening_of(rounding)[1] == 0.0
    assert whitening_of(moments([0.7] * 4), 0.7 + 1e-9)[1] == 0.0
    assert whitening_of(moments([0.7, 0.7001]))[1] > 1000.0
    assert whitening_of(moments([1e-12, 0.0]))[1] == pytest.approx(1 / math.sqrt(EPSILON), rel=1e-6)


@pytest.mark.parametrize("centre", [None, 0.25])
@pytest.mark.parametrize("valid", [0, 1])
def test_fewer_than_two_valid_tokens_are_not_whitened(valid, centre):
    """Pitfall 8: whitening with one valid token gives NaN (Bessel)."""
    x = torch.tensor([[3.0, math.nan, math.inf]])
    mask = torch.tensor([[valid == 1, False, False]])
    assert Moments.of(x, mask).variance == 0.0
    assert whitening_of(Moments.of(x, mask), centre) == (0.0, 1.0)
    assert whiten(x, mask, centre).tolist() == [[3.0 * valid, 0.0, 0.0]]


def test_formula_with_and_without_a_centre():
    x = torch.tensor([[1.0, 2.0, 6.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    assert whitening_of(Moments.of(x, mask)) == pytest.approx((3.0, 1 / math.sqrt(14 / 2 + EPSILON)), rel=1e-14)
    assert whitening_of(Moments.of(x, mask), 2.0) == pytest.approx((2.0, 1 / math.sqrt(17 / 2 + EPSILON)), rel=1e-14)


def test_random_advantages_come_out_standardised():
    """Golden row 'whitening': 8x10 random, abs(mean) < 0.1 and abs(std - 1) < 0.2; here exactly."""
    x = 3 * torch.randn(8, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    white = whiten(x, torch.ones(8, 10).bool())
    assert white.mean().abs() < 1e-12
    assert (white.std(unbiased=True) - 1).abs() < 1e-7


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_masked_positions_have_no_influence(poison):
    """Pitfall 47: NaN at masked positions."""
    x = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    before = x.clone()
    clean, dirty = whiten(x, mask), whiten(x.masked_fill(~mask, poison), mask)
    assert torch.equal(clean, dirty)
    assert clean[~mask].eq(0).all()
    assert torch.equal(x, before)


def test_non_finite_valid_advantages_stay_visible():
    x, mask = torch.tensor([[1.0, math.nan, 2.0]]), torch.ones(1, 3).bool()
    assert whiten(x, mask).isnan().all()


def test_a_broadcast_mask_is_an_error():
    with pytest.raises(ValueError, match=r"^x\.shape="):
        Moments.of(torch.ones(2, 3), torch.ones(3).bool())
    with pytest.raises(ValueError, match=r"^advantages\.shape="):
        apply_whitening(torch.ones(2, 3), torch.ones(3).bool(), 0.0, 1.0)


def test_moments_survive_packing():
    got = moments([1.0, 2.5, -7.0])
    assert got.to_tensor().dtype == torch.float64
    assert Moments.from_tensor(got.to_tensor()) == got
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.count = 3.0


def test_running_centre_is_the_weighted_mean_of_earlier_steps():
    means, decay = [1.0, -2.0, 5.0, 0.5], 0.9
    running = RunningCentre(decay)
    assert running.centre == 0.0
    for n, mean in enumerate(means, start=1):
        running = running.updated(mean)
        weights = [decay ** (n - 1 - k) for k in range(n)]
        expected = sum(w * m for w, m in zip(weights, means, strict=False)) / sum(weights)
        assert running.centre == pytest.approx(expected, rel=1e-12)
        assert running.steps == n


def test_running_centre_without_memory_is_the_last_mean():
    assert RunningCentre(0.0).updated(3.0).updated(-1.5).centre == -1.5


def test_running_centre_survives_a_checkpoint():
    running = RunningCentre(0.9).updated(1 / 3).updated(2 / 7)
    state = json.loads(json.dumps(running.state_dict()))
    assert {type(value) for value in running.state_dict().values()} == {float, int}
    assert RunningCentre.from_state_dict(state) == running
    assert RunningCentre.from_state_dict(state).updated(1.0) == running.updated(1.0)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_running_centre_needs_a_decay_below_one(decay):
    with pytest.raises(ValueError, match=r"^decay="):
        RunningCentre(decay)
