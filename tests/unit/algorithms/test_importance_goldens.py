"""Importance weights: the golden rows of the reference systems, and faults that users reported."""

import math

import pytest
import torch

from lightning_ppo.algorithms import importance_weights, policy_loss


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def full(x):
    return torch.ones_like(x, dtype=torch.bool)


RATIO, ADVANTAGE = f64([0.5, 1.0, 1.5]), f64([1.0, -1.0, 2.0])
GAPS = f64([-0.5, 0.5, -0.2])
"""log-probs of the trainer minus those of the engine, in the golden rows on importance weights."""


def weighted_loss(old_minus_rollout, kind, ratio=RATIO, **bounds):
    zeros = torch.zeros_like(old_minus_rollout)
    got = importance_weights(zeros, -old_minus_rollout, full(zeros), kind, **bounds)
    return got, policy_loss(
        ratio.log(), zeros, ADVANTAGE, full(zeros), clip_eps=0.2, weights=got.weights
    ).loss.item() / 3


def test_truncated_importance_sampling():
    """Max .8, prev - gen = -.5, .5, -.2: w = .6065, .8, .8, mean loss -0.4744."""
    got, loss = weighted_loss(GAPS, "truncated", clip_max=0.8)
    torch.testing.assert_close(got.weights, f64([0.6065, 0.8, 0.8]), rtol=0, atol=5e-5)
    assert got.out_of_bounds.item() == 2
    assert loss == pytest.approx(-0.4744, abs=5e-5)


@pytest.mark.parametrize(
    ("clip_max", "weight", "expected", "outside"), [(0.8, 0.8, -0.50667, 3), (2.0, 0.93551, -0.59249, 0)]
)
def test_sequence_importance_sampling(clip_max, weight, expected, outside):
    """Recomputed: the source has w = exp(sum) = .8187, cut to .8, and combines it with sequence-level *ratios* to
    -0.4846. Here w = exp(mean) = exp(-.2 / 3) = .9355 on token-level ratios, whose mean loss without weights is
    -0.6333: times .8 with max .8, and times .9355 with max 2."""
    got, loss = weighted_loss(GAPS, "sequence", clip_max=clip_max)
    torch.testing.assert_close(got.weights, f64([weight] * 3), rtol=0, atol=5e-6)
    assert got.raw_max.item() == pytest.approx(0.93551, abs=5e-6)
    assert got.out_of_bounds.item() == outside
    assert loss == pytest.approx(expected, abs=5e-6)


def test_sequence_weight_is_the_length_normalised_ratio():
    """The golden row of the sequence-level ratio: token ratios .5, 1, 1.5 give .9086."""
    got, _ = weighted_loss(RATIO.log(), "sequence")
    torch.testing.assert_close(got.weights, f64([0.9086] * 3), rtol=0, atol=5e-5)


def test_icepop():
    """[.5, 5], w = .607, 12.18, .819, rho = 1: the middle token is zeroed, mean loss -0.748."""
    got, loss = weighted_loss(f64([-0.5, 2.5, -0.2]), "icepop", torch.ones_like(RATIO), clip_min=0.5, clip_max=5.0)
    torch.testing.assert_close(got.weights, f64([0.607, 0.0, 0.819]), rtol=0, atol=5e-4)
    assert got.raw_max.item() == pytest.approx(12.18, abs=5e-3)
    assert (got.out_of_bounds.item(), got.zeroed.item()) == (1, 1)
    assert loss == pytest.approx(-0.748, abs=5e-4)


@pytest.mark.parametrize(
    ("gaps", "kept"),
    [([0.0005] * 3, True), ([0.5, -0.4985, 0.0], True), ([0.01] * 3, False), ([math.inf, 0, 0], False)],
)
def test_sequence_mask(gaps, kept):
    """[.999, 1.002], prev - gen = .0005 each: the row is kept, with raw token weights; -inf from the engine leaves a
    finite loss."""
    got, loss = weighted_loss(f64(gaps), "sequence_mask", torch.ones_like(RATIO), clip_min=0.999, clip_max=1.002)
    torch.testing.assert_close(got.weights, f64(gaps).exp() if kept else torch.zeros(1, 3, dtype=torch.float64))
    assert got.zeroed.item() == got.out_of_bounds.item() == (0 if kept else 3)
    assert math.isfinite(loss)
    assert (loss != 0) == kept


@pytest.mark.parametrize(
    ("raw", "clip_min", "expected", "out_of_bounds"),
    [
        ([1.0, 3.0, 0.5], 0.0, [1.0, 2.0, 0.5], 1 / 3),
        ([0.1, 1.0, 3.0], 0.0, [0.1, 1.0, 2.0], 1 / 3),
        ([0.1, 1.0, 3.0], 0.5, [0.5, 1.0, 2.0], 2 / 3),
    ],
)
def test_out_of_bounds_fraction(raw, clip_min, expected, out_of_bounds):
    """w = 1, 3, .5 with max 2; w = .1, 1, 3 with min none and min .5."""
    got, _ = weighted_loss(f64(raw).log(), "truncated", clip_min=clip_min, clip_max=2.0)
    torch.testing.assert_close(got.weights, f64(expected))
    assert got.out_of_bounds.item() / 3 == pytest.approx(out_of_bounds)


@pytest.mark.parametrize("kind", ["token", "truncated", "sequence", "icepop", "sequence_mask"])
def test_minus_infinity_from_the_engine_leaves_a_finite_loss(kind):
    got, loss = weighted_loss(f64([math.inf, 0.0, 0.0]), kind, clip_min=0.5)
    assert math.isfinite(loss)
    assert got.weights[0, 0].item() == 0.0


def test_a_long_healthy_row_keeps_its_weight():
    """NeMo RL 2269: 8,000 tokens, each 0.04 % less likely: exp of the sum weighs them with 0.06, of the mean with 1."""
    gaps = torch.full((1, 8000), -3.5e-4)
    got = importance_weights(gaps, torch.zeros_like(gaps), full(gaps), "sequence")
    assert float(gaps.double().sum().exp()) == pytest.approx(0.0608, abs=1e-4)
    torch.testing.assert_close(got.weights, torch.full_like(gaps, math.exp(-3.5e-4)))


def test_the_raw_weight_shows_what_the_bounds_hide():
    """NeMo RL 2269 asks for it: a clamp to [0, 2] makes a mean of 2 out of anything."""
    old = f64([3.0, 5.0])
    got = importance_weights(old, torch.zeros_like(old), full(old), "truncated")
    assert got.weights.tolist() == [[2.0, 2.0]]
    sums = [got.weight_sum, got.raw_sum, got.raw_max, got.out_of_bounds, got.zeroed]
    assert list(map(float, sums)) == pytest.approx([4.0, math.exp(3) + math.exp(5), math.exp(5), 2.0, 0.0])


@pytest.mark.parametrize("kind", ["truncated", "sequence", "icepop", "sequence_mask"])
def test_a_bound_belongs_to_what_is_inside(kind):
    zeros = torch.zeros(1, 2)
    got = importance_weights(zeros, zeros, full(zeros), kind, clip_min=1.0, clip_max=1.0)
    assert got.weights.tolist() == [[1.0, 1.0]]
    assert got.out_of_bounds.item() == got.zeroed.item() == 0
