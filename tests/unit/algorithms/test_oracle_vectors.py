"""Against verl 0.9.1 (Apache-2.0), float64 on torch 2.13.0.

`oracle_vectors.json` holds inputs and outputs recorded from verl's `compute_gae_advantage_return`,
`compute_policy_loss`, `agg_loss`, `compute_value_loss`, `kl_penalty_forward` and `masked_whiten`; `mask` has ragged
rows, `mt` has multi-turn holes.
"""

import pytest
import torch

from lightning_ppo.algorithms import (
    Moments,
    aggregate,
    apply_whitening,
    gae,
    kl_estimate,
    policy_loss,
    value_loss,
    whitening_of,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
ROW_MEAN = {"rtol": 1e-7, "atol": 0}  # verl adds 1e-8 to each row's count


@pytest.fixture
def given(oracle):
    inputs = dict(oracle["inputs"])
    return inputs | {"mask": inputs["mask"].bool(), "mt": inputs["mt"].bool()}


@pytest.mark.parametrize("mask_name", ["mask", "mt"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95)])
def test_gae(oracle, given, mask_name, gamma, lam):
    expected, mask = oracle["outputs"][f"gae_{mask_name}_{gamma}_{lam}"], given[mask_name]
    advantages, returns = gae(given["r"], given["v"], mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, expected["adv"], **EXACT)
    torch.testing.assert_close(returns, expected["returns"], **EXACT)
    white = apply_whitening(advantages, mask, *whitening_of(Moments.of(advantages, mask)))
    torch.testing.assert_close(white, torch.where(mask, expected["adv_whitened"], 0.0), **EXACT)


@pytest.mark.parametrize(("high", "dual"), [(0.2, None), (0.28, None), (0.2, 3.0)])
def test_policy_loss(oracle, given, high, dual):
    expected = oracle["outputs"][f"pg_0.2_{high}_{1e9 if dual is None else dual}"]
    mask = given["mask"]
    got = policy_loss(given["new"], given["old"], given["adv"], mask, clip_eps=0.2, clip_eps_high=high, dual_clip=dual)
    count = mask.sum()
    torch.testing.assert_close(got.loss / count, expected["loss"], **EXACT)
    torch.testing.assert_close(got.approx_kl_sum / count, expected["ppo_kl"], **EXACT)
    torch.testing.assert_close(got.clipped_tokens / count, expected["clipfrac"], rtol=1e-6, atol=1e-6)


def test_aggregations(oracle, given):
    mask, outputs = given["mask"], oracle["outputs"]
    ratio = (given["new"] - given["old"]).exp()
    per_token = torch.max(-given["adv"] * ratio, -given["adv"] * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(aggregate(per_token, mask, "token") / mask.sum(), outputs["agg_token-mean"], **EXACT)
    by_row = aggregate(per_token, mask, "sequence") / len(mask)
    torch.testing.assert_close(by_row, outputs["agg_seq-mean-token-mean"], **ROW_MEAN)
    through_loss = policy_loss(given["new"], given["old"], given["adv"], mask, clip_eps=0.2, level="sequence").loss
    torch.testing.assert_close(through_loss / len(mask), outputs["agg_seq-mean-token-mean"], **ROW_MEAN)


def test_value_loss(oracle, given):
    mask, expected = given["mask"], oracle["outputs"]["value_loss"]
    got = value_loss(given["vnew"], given["vold"], given["ret"], mask, clip_eps=0.2)
    torch.testing.assert_close(got.loss / mask.sum(), expected["loss"], **EXACT)
    torch.testing.assert_close(got.clipped_tokens / mask.sum(), expected["clipfrac"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl(oracle, given, kind, name):
    got = kl_estimate(given["new"], given["ref"], kind, output_clamp=10.0 if kind == "k3" else None)
    torch.testing.assert_close(got, oracle["outputs"][f"kl_{name}"], **EXACT)


def test_whiten(oracle, given):
    mask = given["mask"]
    white = apply_whitening(given["adv"], mask, *whitening_of(Moments.of(given["adv"], mask)))
    torch.testing.assert_close(white, torch.where(mask, oracle["outputs"]["whiten"], 0.0), **EXACT)
