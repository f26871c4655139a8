import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import estimate_advantages, gae, length_adaptive_lambda

QUICK = settings(max_examples=60, deadline=None, database=None)
UNIT = st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999, 1.0])


def reference_row(rewards, values, mask, gamma, lam, bootstrap=0.0):
    """Plain backward recursion over one row in Python floats; masked tokens are skipped."""
    advantages = [0.0] * len(mask)
    following, running = bootstrap, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            running = rewards[t] + gamma * following - values[t] + gamma * lam * running
            following, advantages[t] = values[t], running
    return advantages


def reference(rewards, values, mask, gamma, lams, bootstrap):
    rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), lams, bootstrap, strict=True)
    return torch.tensor([reference_row(r, v, m, gamma, lam, b) for r, v, m, lam, b in rows], dtype=torch.float64)


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 19))
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    return rewards, values, torch.tensor(bits).view(rows, width), bootstrap


@QUICK
@given(batches(), UNIT, UNIT)
def test_equals_the_plain_recursion(batch, gamma, lam):
    rewards, values, mask, bootstrap = batch
    expected = reference(rewards, values, mask, gamma, [lam] * len(mask), bootstrap.tolist())
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-12, atol=1e-12)


@QUICK
@given(batches(), UNIT)
def test_each_row_may_have_its_own_lambda(batch, gamma):
    rewards, values, mask, _ = batch
    lams = torch.linspace(0.0, 1.0, len(mask), dtype=torch.float64)
    expected = reference(rewards, values, mask, gamma, lams.tolist(), [0.0] * len(mask))
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lams)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


@QUICK
@given(batches(), UNIT, UNIT)
def test_masked_equals_compacted(batch, gamma, lam):
    """Pitfall 2: with a multi-turn mask, tokens of other turns change; a hole must act as if it were cut out."""
    rewards, values, mask, bootstrap = batch
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for row in range(len(mask)):
        keep = mask[row]
        cut = [x[row][keep].unsqueeze(0) for x in (rewards, values, mask)]
        alone = gae(*cut, gamma=gamma, lam=lam, bootstrap=bootstrap[row : row + 1])
        torch.testing.assert_close(advantages[row][keep], alone[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns[row][keep], alone[1][0], rtol=1e-12, atol=1e-12)
    assert advantages[~mask].eq(0).all()
    assert returns[~mask].eq(0).all()


def test_multi_turn_example():
    """Pitfall 2: mask 1,1,0,0,0,1,1; the earlier turn sees the later one as if the gap were not there."""
    mask = torch.tensor([[True, True, False, False, False, True, True]])
    values = torch.tensor([[0.1, 0.2, 7.0, 8.0, 9.0, 0.3, 0.4]])
    rewards = torch.tensor([[0.0, 0.0, 3.0, 3.0, 3.0, 0.0, 1.0]])
    compact = gae(rewards[mask][None], values[mask][None], mask[mask][None], gamma=0.9, lam=0.8)
    holes = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(holes[0][mask], compact[0][0])
    torch.testing.assert_close(holes[1][mask], compact[1][0])


@QUICK
@given(batches(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 5))
def test_padding_and_poison_change_nothing(batch, poison, extra):
    """Pitfall 47: NaN times 0; here in the recursion, and with any amount of padding on the right."""
    rewards, values, mask, _ = batch
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    pad = torch.nn.functional.pad
    wide_mask = pad(mask, (0, extra))
    dirty = [pad(x, (0, extra)).masked_fill(~wide_mask, poison) for x in (rewards, values)]
    wide = gae(*dirty, wide_mask, gamma=0.9, lam=0.8)
    for expected, got in zip(clean, wide, strict=True):
        assert torch.equal(pad(expected, (0, extra)), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.9999), (0.999, 0.95)])
def test_long_rows_are_accurate(dtype, tolerance, gamma, lam):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 4096, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(2, 4096, generator=generator) < 0.9
    expected = reference(rewards, values, mask, gamma, [lam] * 2, [0.0] * 2)
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert advantages.dtype == dtype
    error = (advantages.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


def test_terminated_rows_end_with_zero_and_truncated_ones_with_the_bootstrap():
    """Pitfall 16: V is bootstrapped on terminated episodes as well as on truncated ones."""
    rewards, values = torch.zeros(2, 3), torch.full((2, 3), 0.5)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    bootstrap = torch.tensor([0.0, 2.0])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0, bootstrap=bootstrap)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.0], [0.5, 1.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, -0.5, 0.0], [0.0, 0.5, 0.0]]))
    without = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    assert without[1].eq(0).all()


def test_bootstrap_of_a_fully_masked_row_is_ignored():
    mask = torch.tensor([[False, False], [True, True]])
    bootstrap = torch.tensor([math.nan, 0.0])
    advantages, returns = gae(torch.ones(2, 2), torch.zeros(2, 2), mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    assert advantages.tolist() == [[0.0, 0.0], [2.0, 1.0]]
    assert returns.tolist() == [[0.0, 0.0], [2.0, 1.0]]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (2, 3)])
def test_nothing_valid(shape):
    advantages, returns = gae(torch.ones(shape), torch.ones(shape), torch.zeros(shape).bool(), gamma=0.9, lam=0.9)
    assert advantages.shape == returns.shape == shape
    assert advantages.eq(0).all()
    assert returns.eq(0).all()


def test_no_gradient_and_inputs_not_modified():
    """Pitfall 5: inputs stay as they were."""
    rewards, values = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    before = [rewards.clone(), values.detach().clone(), mask.clone()]
    results = estimate_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.9, length_adaptive_alpha=0.5)
    assert not any(result.requires_grad for result in results)
    assert all(torch.equal(a, b) for a, b in zip(before, [rewards, values.detach(), mask], strict=True))


def test_wrong_shapes_are_errors():
    ones, mask = torch.ones(2, 3), torch.ones(2, 3).bool()
    for name, arguments in {
        "rewards": {"rewards": torch.ones(3)},
        "values": {"values": torch.ones(2, 3, 1)},
        "lam": {"lam": torch.ones(2, 3)},
        "bootstrap": {"bootstrap": torch.ones(3)},
    }.items():
        call = {"rewards": ones, "values": ones, "mask": mask, "gamma": 1.0, "lam": 1.0, **arguments}
        with pytest.raises(ValueError, match=rf"^{name}\.shape="):
            gae(**call)


def test_length_adaptive_lambda():
    """Golden row: alpha .05, l = 3 and 8 clamp to 0; l = 40 gives 0.5 and l = 1000 gives 0.98."""
    lengths = torch.tensor([0, 3, 8, 20, 40, 1000])
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.98], dtype=torch.float64)
    torch.testing.assert_close(length_adaptive_lambda(lengths, 0.05), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "value_lambda", "policy_lambda"),
    [
        ({}, 0.9, [0.9, 0.9]),
        ({"gae_lambda_value": 1.0}, 1.0, [0.9, 0.9]),
        ({"gae_lambda_policy": 0.5}, 0.9, [0.5, 0.5]),
        ({"gae_lambda_value": 1.0, "gae_lambda_policy": 0.5}, 1.0, [0.5, 0.5]),
        ({"length_adaptive_alpha": 0.5}, 0.9, [1 - 1 / 3, 0.5]),
        ({"gae_lambda_policy": 0.1, "length_adaptive_alpha": 0.5}, 0.9, [1 - 1 / 3, 0.5]),
        ({"gae_lambda_value": 0.0, "length_adaptive_alpha": 0.5}, 0.0, [1 - 1 / 3, 0.5]),
    ],
)
def test_which_lambda_is_used_where(arguments, value_lambda, policy_lambda):
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 2, 6, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(2, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    got = estimate_advantages(rewards, values, mask, gamma=0.95, gae_lambda=0.9, bootstrap=bootstrap, **arguments)
    lams = torch.tensor(policy_lambda, dtype=torch.float64)
    torch.testing.assert_close(got[0], gae(rewards, values, mask, gamma=0.95, lam=lams, bootstrap=bootstrap)[0])
    torch.testing.assert_close(got[1], gae(rewards, values, mask, gamma=0.95, lam=value_lambda, bootstrap=bootstrap)[1])


def test_one_pass_when_both_lambdas_are_equal(monkeypatch):
    calls = []
    module = __import__("lightning_ppo.algorithms.advantages", fromlist=["gae"])

    def counted(*args, **kwargs):
        calls.append(kwargs["lam"])
        return gae(*args, **kwargs)

    monkeypatch.setattr(module, "gae", counted)
    data = torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool()
    estimate_advantages(*data, gamma=1.0, gae_lambda=0.9, gae_lambda_policy=0.9)
    assert calls == [0.9]
    estimate_advantages(*data, gamma=1.0, gae_lambda=0.9, gae_lambda_policy=0.5)
    assert calls == [0.9, 0.9, 0.5]


@pytest.mark.parametrize("function", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5)])
def test_agrees_with_torchrl_on_multi_turn_rows(function, bootstrapped, gamma, lam):
    """torchrl knows no holes: it gets each row's valid tokens only. It keeps gamma and lambda in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives.value import functional
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 3, 30, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 30, generator=generator) < 0.6
    bootstrap = torch.randn(3, generator=generator, dtype=torch.float64) * bootstrapped
    ours = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for row in range(3):
        kept_values = values[row][mask[row]]
        done = torch.zeros(1, len(kept_values), 1, dtype=torch.bool)
        done[:, -1] = not bootstrapped
        following = torch.cat([kept_values[1:], bootstrap[row : row + 1]])
        theirs = getattr(functional, function)(
            gamma,
            lam,
            kept_values.view(1, -1, 1),
            following.view(1, -1, 1),
            rewards[row][mask[row]].view(1, -1, 1),
            done,
            done,
        )
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine[row][mask[row]], other.flatten(), rtol=3e-6, atol=3e-6)
