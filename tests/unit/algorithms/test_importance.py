"""Importance weights of every kind, against loops over Python floats."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import importance_weights

QUICK = settings(max_examples=80, deadline=None, database=None)
KINDS = ["token", "truncated", "sequence", "icepop", "sequence_mask"]
BOUNDED = KINDS[1:]
BOUNDS = {
    "token": (0.0, 2.0), "truncated": (0.0, 1.5), "sequence": (0.75, 1.25), "icepop": (0.5, 2.0),
    "sequence_mask": (0.875, 1.25),
}  # fmt: skip
"""Bounds that 1 lies in, exact in float32, and that about half of the random weights and rows violate."""
POISON = [math.nan, math.inf, -math.inf, 1e30]


def f64(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def full(x):
    return torch.ones_like(x, dtype=torch.bool)


def batch(seed, rows=6, width=9, scale=0.6):
    """Log-probs of two policies, ragged rows with holes, and one row without any valid token."""
    generator = torch.Generator().manual_seed(seed)
    old, noise = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
    mask[rows // 2] = False
    shift = 0.4 * torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return old - 2, old - 2 + scale * noise + shift, mask


def weights_of(old, rollout, mask, kind, **bounds):
    low, high = BOUNDS[kind]
    return importance_weights(old, rollout, mask, kind, **{"clip_min": low, "clip_max": high} | bounds)


def number(result):
    """The float64 sums as plain numbers."""
    sums = (result.weight_sum, result.raw_sum, result.raw_max, result.out_of_bounds, result.zeroed)
    return [float(x) for x in sums]


def exp(x):
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def by_loops(old, rollout, mask, kind, low, high):
    """The definition, token by token: weights and (sum, raw sum, raw maximum, out of bounds, zeroed)."""
    table, raws, used, outside = [], [0.0], [], 0
    for old_row, rollout_row, mask_row in zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True):
        gaps = [a - b for a, b, valid in zip(old_row, rollout_row, mask_row, strict=True) if valid]
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        line = []
        for a, b, valid in zip(old_row, rollout_row, mask_row, strict=True):
            if not valid:
                line.append(1.0)
                continue
            log_weight = mean if kind == "sequence" else a - b
            weight = exp(log_weight)
            usable = math.isfinite(log_weight) and math.isfinite(weight)
            raw = weight if usable else 0.0
            criterion = exp(mean) if kind == "sequence_mask" else raw
            inside = usable and (kind == "token" or low <= criterion <= high)
            if kind in ("truncated", "sequence"):
                weight = min(max(raw, low), high) if usable else 0.0
            else:
                weight = raw if inside else 0.0
            outside += not inside
            raws.append(raw)
            used.append(weight)
            line.append(weight)
        table.append(line)
    return table, [sum(used), sum(raws), max(raws), outside, used.count(0.0)]


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.sampled_from([None, *POISON[:3]]), st.booleans())
def test_weights_and_sums_equal_the_loops(seed, kind, poison, on_old):
    """Also when the engine or the trainer reports nonsense for some valid tokens."""
    old, rollout, mask = batch(seed)
    if poison is not None:
        hit = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.1
        (old if on_old else rollout).masked_fill_(hit, poison)
    got = weights_of(old, rollout, mask, kind)
    table, sums = by_loops(old, rollout, mask, kind, *BOUNDS[kind])
    torch.testing.assert_close(got.weights, torch.tensor(table, dtype=torch.float64), rtol=1e-12, atol=0)
    assert number(got) == pytest.approx(sums, rel=1e-12)


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(BOUNDED), st.sampled_from([torch.float32, torch.float64]))
def test_bounds_hold(seed, kind, dtype):
    old, rollout, mask = batch(seed, scale=3.0)
    got = weights_of(old.to(dtype), rollout.to(dtype), mask, kind)
    low, high = BOUNDS[kind]
    used = got.weights[mask]
    if kind == "sequence_mask":
        # the criterion is bounded, not the weights
        means = [(o - r)[m].mean().exp() for o, r, m in zip(old, rollout, mask, strict=True)]
        kept = torch.tensor([[bool(low <= mean <= high)] for mean in means]) & mask
        assert torch.equal(used != 0, kept[mask])
    else:
        assert (((used >= low) & (used <= high)) | ((used == 0) & (kind == "icepop"))).all()
    assert got.zeroed.item() == (used == 0).sum()


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.sampled_from([torch.float32, torch.float64]))
def test_equal_logprobs_weigh_exactly_1(seed, kind, dtype):
    """On-policy data of a perfect engine: every kind is the identity, bit for bit."""
    old, _, mask = batch(seed)
    got = weights_of(old.to(dtype), old.to(dtype), mask, kind)
    assert torch.equal(got.weights, torch.ones_like(got.weights))
    valid = float(mask.sum())
    assert number(got) == [valid, valid, float(valid > 0), 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", POISON)
def test_masked_positions_change_nothing(kind, poison):
    """Pitfall 47: -inf and NaN where the mask is False."""
    old, rollout, mask = batch(4)
    clean = weights_of(old, rollout, mask, kind)
    dirty = weights_of(old.masked_fill(~mask, poison), rollout.masked_fill(~mask, poison), mask, kind)
    assert torch.equal(clean.weights, dirty.weights)
    assert number(clean) == number(dirty)
    assert clean.weights[~mask].eq(1).all()


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.integers(1, 40))
def test_padding_changes_nothing(seed, kind, width):
    old, rollout, mask = batch(seed)
    nothing = torch.full((len(mask), width), math.nan, dtype=torch.float64)
    longer = [torch.cat([x, nothing], 1) for x in (old, rollout)]
    got = weights_of(*longer, torch.cat([mask, torch.zeros_like(nothing, dtype=torch.bool)], 1), kind)
    alone = weights_of(old, rollout, mask, kind)
    torch.testing.assert_close(got.weights[:, : mask.shape[1]], alone.weights, rtol=1e-13, atol=0)
    assert number(got) == pytest.approx(number(alone), rel=1e-12)


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.permutations(range(6)), st.integers(1, 5))
def test_rows_do_not_know_each_other(seed, kind, order, cut):
    """Any order of the rows, and any split of them: the same weights, and sums that add up."""
    old, rollout, mask = batch(seed)
    whole = weights_of(old, rollout, mask, kind)
    rows = list(order)
    parts = [weights_of(old[i], rollout[i], mask[i], kind) for i in (rows[:cut], rows[cut:])]
    torch.testing.assert_close(torch.cat([p.weights for p in parts]), whole.weights[rows], rtol=1e-13, atol=0)
    first, second = map(number, parts)
    total = [a + b for a, b in zip(first, second, strict=True)]
    total[2] = max(first[2], second[2])
    assert total == pytest.approx(number(whole), rel=1e-12)


@pytest.mark.parametrize("kind", ["sequence", "sequence_mask"])
def test_the_mean_counts_trained_tokens_only(kind):
    """Two trained tokens among five: divided by two, not by the width."""
    mask = torch.tensor([[True, False, True, False, False]])
    old = f64(0.1, 7.0, 0.3, 7.0, 7.0)
    got = importance_weights(old, torch.zeros_like(old), mask, kind, clip_min=0.5, clip_max=math.exp(0.2) + 1e-9)
    wanted = [math.exp(0.2)] * 2 if kind == "sequence" else [math.exp(0.1), math.exp(0.3)]
    assert got.weights[mask].tolist() == pytest.approx(wanted, rel=1e-12)
    assert got.out_of_bounds.item() == 0


def test_without_correction_every_weight_is_1():
    old, rollout, mask = batch(0)
    got = importance_weights(old, rollout * math.nan, mask, "none", clip_min=5.0, clip_max=-1.0)
    assert got.weights is None
    assert number(got) == [mask.sum(), mask.sum(), 1.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_valid_token(kind, shape):
    nothing = torch.full(shape, math.nan)
    got = importance_weights(nothing, nothing, torch.zeros(shape).bool(), kind, clip_min=0.5)
    assert got.weights is None or torch.equal(got.weights, torch.ones(shape))
    assert number(got) == [0.0] * 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_detached_and_keep_the_dtype(kind, dtype):
    old, rollout, mask = batch(1)
    before = [old.clone(), rollout.clone()]
    got = weights_of(old.to(dtype).requires_grad_(), rollout.to(dtype).requires_grad_(), mask, kind)
    assert got.weights.dtype == dtype
    for x in (got.weights, got.weight_sum, got.raw_sum, got.raw_max, got.out_of_bounds, got.zeroed):
        assert not x.requires_grad
    assert all(x.dtype == torch.float64 for x in (got.weight_sum, got.raw_sum, got.raw_max, got.zeroed))
    assert torch.equal(before[0], old)
    assert torch.equal(before[1], rollout)


@pytest.mark.parametrize(
    ("kind", "bounds", "message"),
    [
        ("mean", {}, "kind=mean is unknown; choose one of none, token, truncated, sequence, icepop, sequence_mask"),
        *[
            (kind, {"clip_min": 3.0}, "clip_min=3.0 is above clip_max=2.0; set clip_min <= clip_max")
            for kind in BOUNDED
        ],
        *[
            (kind, {}, f"clip_min=0.0 leaves kind={kind} without a lower bound; set a number above 0")
            for kind in ("icepop", "sequence_mask")
        ],
    ],
)
def test_what_cannot_be_meant(kind, bounds, message):
    x = f64(0.0)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        importance_weights(x, x, full(x), kind, **bounds)


def test_shapes_must_fit():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^rollout_logprobs\.shape=\(3,\)"):
        importance_weights(x, x[0], mask, "token")
