import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import kl_estimate, kl_loss_terms

KINDS = ["k1", "k2", "k3"]
QUICK = settings(max_examples=60, deadline=None, database=None)
FREE = {"input_clamp": None, "output_clamp": None}


def f64(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "free", "clamped"),
    [
        ("k1", [-1.0, 14.0, 29.0], [-1.0, 10.0, 10.0]),
        ("k2", [0.5, 98.0, 420.5], [0.5, 10.0, 10.0]),
        ("k3", [math.e - 2, 13.0, 28.0], [math.e - 2, 10.0, 10.0]),
    ],
)
def test_golden_estimates(kind, free, clamped):
    """Golden row 'k1/k2/k3 at p = -1, ref = 0, -15, -30', without clamps and with 20 / 10."""
    logprobs, ref = f64(-1.0, -1.0, -1.0), f64(0.0, -15.0, -30.0)
    torch.testing.assert_close(kl_estimate(logprobs, ref, kind, **FREE), f64(*free), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl_estimate(logprobs, ref, kind), f64(*clamped), rtol=1e-12, atol=1e-12)


def test_golden_penalty():
    """Golden row 'KL penalty .1': ref - curr = -1, 0, 1 gives 0.0362."""
    terms = kl_loss_terms(f64(0.0, 0.0, 0.0), f64(-1.0, 0.0, 1.0), torch.ones(1, 3).bool(), "k3")
    assert 0.1 * terms.sum().item() / 3 == pytest.approx(0.0362, abs=5e-5)


def test_golden_clamp_order():
    """Golden row 'KL clamp order': input clamp 2 at curr - ref = -3 gives 4.389 and gradient exactly 0; output clamp 1
    comes after the weight and stops the gradient, too."""
    logprobs = f64(-3.0, -0.5).requires_grad_()
    mask = torch.ones(1, 2).bool()
    terms = kl_loss_terms(logprobs, f64(0.0, 0.0), mask, "k3", input_clamp=2.0, output_clamp=None)
    assert terms[0, 0].item() == pytest.approx(4.389, abs=5e-4)
    (grad,) = torch.autograd.grad(terms.sum(), logprobs)
    assert grad[0, 0].item() == 0.0
    assert grad[0, 1].item() != 0.0
    held = kl_loss_terms(logprobs, f64(0.0, 0.0), mask, "k3", input_clamp=None, output_clamp=1.0)
    (grad,) = torch.autograd.grad(held.sum(), logprobs)
    assert held[0, 0].item() == 1.0
    assert grad[0, 0].item() == 0.0


@QUICK
@given(st.floats(-6, 0), st.floats(-6, 0))
def test_golden_gradient_of_k3(curr, ref):
    """Golden row 'KL gradient': kl + 1 - exp(ref - curr)."""
    logprobs, kl = f64(curr).requires_grad_(), math.exp(ref - curr) - 1 - (ref - curr)
    terms = kl_loss_terms(logprobs, f64(ref), torch.ones(1, 1).bool(), "k3", **FREE)
    terms.sum().backward()
    assert terms.item() == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(kl + 1 - math.exp(ref - curr), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_expected_value(kind):
    """Pitfall 46: the KL loss misses the gradient of the sampling probability. Finite differences of
    E_{a ~ policy}[estimate(a)] on a 3-token categorical, against the expectation of the per-token gradients."""
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64)
    ref = torch.tensor([0.5, 0.2, -0.4], dtype=torch.float64).log_softmax(0)

    def expected(x):
        logprobs = x.log_softmax(0)
        return (logprobs.exp() * kl_estimate(logprobs, ref, kind, **FREE)).sum()

    numeric = torch.stack([(expected(logits + h) - expected(logits - h)) / 2e-5 for h in 1e-5 * torch.eye(3)])
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(0)
    terms = kl_loss_terms(logprobs[None], ref[None], torch.ones(1, 3).bool(), kind)
    (terms[0] * logprobs.detach().exp()).sum().backward()
    torch.testing.assert_close(leaf.grad, numeric.to(torch.float64), rtol=1e-6, atol=1e-7)
    if kind != "k2":
        exact = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (logits, ref)))
        assert (terms[0] * logprobs.exp()).sum().item() == pytest.approx(exact.item(), rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_clamped_input_stops_both_parts_of_the_gradient(kind):
    """Pitfall 46, second half: the clamp must stop the sampling-probability gradient, too."""
    logprobs = f64(-30.0, -1.0, -math.inf).requires_grad_()
    terms = kl_loss_terms(logprobs, f64(-1.0, -30.0, -1.0), torch.ones(1, 3).bool(), kind, output_clamp=None)
    terms.sum().backward()
    assert terms.isfinite().all()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("clamps", [{}, FREE], ids=["clamped", "free"])
def test_masked_positions_have_no_value_and_no_gradient(kind, poison, clamps):
    """Pitfall 47: -inf and NaN log-probs where the mask is False."""
    mask = torch.tensor([[True, False, True]])
    logprobs, ref = f64(-1.0, poison, -2.0).requires_grad_(), f64(-1.5, poison, -0.5)
    terms = kl_loss_terms(logprobs, ref, mask, kind, **clamps)
    terms.sum().backward()
    clean = f64(-1.0, 0.0, -2.0).requires_grad_()
    expected = kl_loss_terms(clean, f64(-1.5, 0.0, -0.5), mask, kind, **clamps)
    expected.sum().backward()
    assert torch.equal(terms, expected)
    assert torch.equal(logprobs.grad, clean.grad)
    assert terms[0, 1].item() == logprobs.grad[0, 1].item() == 0.0


def test_a_valid_nan_stays_visible():
    terms = kl_loss_terms(f64(math.nan, -1.0), f64(-1.0, -1.0), torch.ones(1, 2).bool(), "k3")
    assert terms.isnan().tolist() == [[True, False]]


def test_reference_gets_no_gradient():
    ref = f64(-1.0).requires_grad_()
    logprobs = f64(-2.0).requires_grad_()
    kl_loss_terms(logprobs, ref, torch.ones(1, 1).bool(), "k3").sum().backward()
    assert ref.grad is None


def test_unknown_kind_names_the_allowed_ones():
    """Pitfall 49: a documented option raises; here every documented one runs (above) and others are named."""
    with pytest.raises(ValueError, match=r"^kind=k3\+ is unknown; choose one of k1, k2, k3$"):
        kl_estimate(f64(0.0), f64(0.0), "k3+")
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_loss_terms(f64(0.0), f64(0.0), torch.ones(1, 1).bool(), "mse")


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match=r"^ref_logprobs\.shape="):
        kl_estimate(torch.zeros(2, 3), torch.zeros(3), "k1")
    with pytest.raises(ValueError, match=r"^ref_logprobs\.shape="):
        kl_loss_terms(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3).bool(), "k1")
