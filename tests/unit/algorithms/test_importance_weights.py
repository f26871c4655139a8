"""Importance weights: exp(old - rollout), truncated, detached, by selection."""

import math

import pytest
import torch

from lightning_ppo.algorithms import importance_weights


def f64(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def test_masked_tokens_are_never_out_of_bounds():
    weights, outside = importance_weights(
        f64(0.0, 0.0), f64(0.0, 0.0), torch.tensor([[True, False]]), "truncated", clip_max=0.8
    )
    assert weights.tolist() == [[0.8, 1.0]]
    assert outside.item() == 1


def test_importance_weights_per_kind():
    old, rollout = f64(*map(math.log, [1.0, 3.0, 0.5, 7.0])), f64(0.0, 0.0, 0.0, 0.0)
    mask = torch.tensor([[True, True, True, False]])
    assert importance_weights(old, rollout, mask, "none") == (None, torch.tensor(0.0, dtype=torch.float64))
    weights, outside = importance_weights(old, rollout, mask, "token")
    torch.testing.assert_close(weights, f64(1.0, 3.0, 0.5, 1.0))
    assert outside.item() == 0
    weights, outside = importance_weights(old, rollout, mask, "truncated", clip_min=0.6, clip_max=2.0)
    torch.testing.assert_close(weights, f64(1.0, 2.0, 0.6, 1.0))
    assert outside.item() == 2
    with pytest.raises(ValueError, match=r"^kind=icepop is unknown; choose one of none, token, truncated$"):
        importance_weights(old, rollout, mask, "icepop")


@pytest.mark.parametrize("kind", ["token", "truncated"])
def test_a_weight_that_is_not_finite_drops_the_token(kind):
    old, rollout = f64(0.0, math.nan, 0.0, 0.0), f64(-math.inf, 0.0, math.inf, 0.0)
    mask = torch.ones(1, 4).bool()
    weights, outside = importance_weights(old, rollout, mask, kind, clip_min=0.5)
    floor = 0.5 if kind == "truncated" else 0.0
    assert weights.tolist() == [[0.0, 0.0, floor, 1.0]]
    assert outside.item() == (3 if kind == "truncated" else 2)
