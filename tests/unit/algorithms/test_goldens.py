"""Numbers written down by others: the golden rows of the reference systems, and vectors of public test suites."""

import pytest
import torch

from lightning_ppo.algorithms import (
    aggregate,
    estimate_advantages,
    gae,
    masked_mean,
    policy_loss,
    token_entropy,
    token_rewards,
)


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def full(x):
    return torch.ones_like(x, dtype=torch.bool)


def test_monte_carlo_returns():
    """lambda = gamma = 1, V = 0.5 four times, R = 1: returns are A + V, and 1 everywhere."""
    values = f64([0.5] * 4)
    rewards = token_rewards(torch.ones(1, dtype=torch.float64), full(values))
    advantages, returns = gae(rewards, values, full(values), gamma=1.0, lam=1.0)
    assert returns.tolist() == [[1.0] * 4]
    assert torch.equal(advantages + values, returns)


@pytest.mark.parametrize("bootstrap", [None, 0.0])
def test_one_step_advantages(bootstrap):
    """lambda = 0, V = 1, 2, 3, R = 5: A = 1, 1, 2."""
    values, rewards = f64([1.0, 2.0, 3.0]), f64([0.0, 0.0, 5.0])
    start = None if bootstrap is None else torch.tensor([bootstrap])
    assert gae(rewards, values, full(values), gamma=1.0, lam=0.0, bootstrap=start)[0].tolist() == [[1.0, 1.0, 2.0]]


def test_gap_skipping():
    """gamma .99, lambda .95, V = .1, .2, 999, .4, .5, mask 1, 1, 0, 1, 1: equals the 4-token sequence; masked A = 0."""
    values, rewards = f64([0.1, 0.2, 999.0, 0.4, 0.5]), f64([0.0, 0.0, 0.0, 0.0, 1.0])
    mask = torch.tensor([[True, True, False, True, True]])
    got, _ = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    short = f64([0.1, 0.2, 0.4, 0.5])
    expected, _ = gae(rewards[mask][None], short, full(short), gamma=0.99, lam=0.95)
    torch.testing.assert_close(got[mask], expected[0], rtol=1e-12, atol=1e-12)
    assert got[0, 2].item() == 0.0


def test_decoupled_lambdas():
    """lambda 1.0 for the critic and 0.5 for the policy: returns are not A + V."""
    rewards, values = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))
    advantages, returns = estimate_advantages(
        rewards, values, full(values), gamma=1.0, gae_lambda=0.9, gae_lambda_value=1.0, gae_lambda_policy=0.5
    )
    assert not torch.allclose(advantages + values, returns)


RATIO, ADVANTAGE = f64([0.5, 1.0, 1.5]), f64([1.0, -1.0, 2.0])


def test_clipped_loss():
    """Clip .2/.2, rho = .5, 1, 1.5, A = 1, -1, 2: per token -.5, 1, -2.4, mean -0.6333."""
    zeros = torch.zeros_like(RATIO)
    got = policy_loss(RATIO.log(), zeros, ADVANTAGE, full(RATIO), clip_eps=0.2)
    assert got.loss.item() / 3 == pytest.approx(-0.6333, abs=5e-5)
    for position, expected in enumerate([-0.5, 1.0, -2.4]):
        only = torch.zeros(1, 3, dtype=torch.bool)
        only[0, position] = True
        alone = policy_loss(RATIO.log(), zeros, ADVANTAGE, only, clip_eps=0.2).loss
        assert alone.item() == pytest.approx(expected, rel=1e-12)


def test_dual_clipped_loss():
    """c = 3, rho = .5, 1, 10, A = 1, -1, -4: -.5, 1, 12, mean 4.1667."""
    ratio = f64([0.5, 1.0, 10.0])
    advantage = f64([1.0, -1.0, -4.0])
    got = policy_loss(ratio.log(), torch.zeros_like(ratio), advantage, full(ratio), clip_eps=0.2, dual_clip=3.0)
    assert got.loss.item() / 3 == pytest.approx(4.1667, abs=5e-5)
    assert got.clipped_tokens.item() == 1


def test_zero_mask():
    """Any loss over no token is exactly 0 and finite, and so is the mean of nothing."""
    nothing = torch.zeros_like(RATIO, dtype=torch.bool)
    assert policy_loss(RATIO.log(), RATIO, ADVANTAGE, nothing, clip_eps=0.2).loss.item() == 0.0
    assert masked_mean(RATIO, nothing).item() == 0.0


RLAX_ADVANTAGES = {
    1.0: [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]],
    0.7: [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]],
    0.4: [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]],
}


@pytest.mark.parametrize("lam", RLAX_ADVANTAGES)
def test_rlax_truncated_gae(lam):
    """google-deepmind/rlax (Apache-2.0), multistep_test.py. Row 0 has discount .99 and bootstraps with V = -1. Row 1
    has discount .9 and a terminal step 3 (discount 0): here a terminated row of four and a bootstrapped row of one. The
    source's own tolerance is 1e-3 (lambda .4 is rounded there)."""
    first, second = RLAX_ADVANTAGES[lam]
    got, _ = gae(
        f64([0.0, 0.0, 1.0, 0.0, -0.5]),
        f64([1.0, 4.0, -3.0, -2.0, -1.0]),
        torch.ones(1, 5).bool(),
        gamma=0.99,
        lam=lam,
        bootstrap=torch.tensor([-1.0]),
    )
    torch.testing.assert_close(got, f64(first), rtol=0, atol=1e-3)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    got, _ = gae(
        f64([0.0] * 4, [1.0, 0.0, 0.0, 0.0]),
        f64([-3.0, -2.0, -1.0, 0.0], [5.0, 0.0, 0.0, 0.0]),
        mask,
        gamma=0.9,
        lam=lam,
        bootstrap=torch.tensor([0.0, -1.0]),
    )
    torch.testing.assert_close(got[mask], torch.tensor(second, dtype=torch.float64), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("bootstrap", "expected"),
    [
        (
            [0.0, 0.0, 0.0],
            [
                [454.8344, 376.1143, 291.298, 200.0],
                [464.5610, 383.1085, 295.387, 201.0],
                [474.2876, 390.1027, 299.476, 202.0],
            ],
        ),
        (
            [-1.0, -2.0, 0.0],
            [
                [454.0109, 375.2386, 290.3669, 199.01],
                [462.9138, 381.3571, 293.5248, 199.02],
                [474.2876, 390.1027, 299.476, 202.0],
            ],
        ),
    ],
    ids=["terminated", "time limit"],
)
def test_tianshou_gae_returns(bootstrap, expected):
    """thu-ml/tianshou (MIT), test_returns.py: three episodes of four steps, gamma .99, lambda .95; V(s) is the array of
    V(s') rolled by one. In the second case episodes 1 and 2 hit the time limit and bootstrap with their last V(s')."""
    rewards = f64([101, 102, 103, 200], [104, 105, 106, 201], [107, 108, 109, 202])
    values = f64([-3, 2, 3, 4], [-1, 5, 6, 7], [-2, 8, 9, 10])
    _, returns = gae(rewards, values, full(values), gamma=0.99, lam=0.95, bootstrap=f64(bootstrap)[0])
    torch.testing.assert_close(returns, f64(*expected), rtol=0, atol=1e-3)


RLAX_LOGITS = f64([1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize(("sign", "expected"), [(1, -0.17117467), (-1, 0.19333333)])
def test_rlax_clipped_surrogate(sign, expected):
    """google-deepmind/rlax (Apache-2.0), policy_gradients_test.py: eps .2, mean over three steps."""
    old_logits = f64([1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [-3.0, -2.0, -1.0])
    new, old = (x.log_softmax(-1).diagonal()[None] for x in (RLAX_LOGITS, old_logits))
    got = policy_loss(new, old, sign * f64([0.3, 0.2, 0.1]), full(new), clip_eps=0.2)
    assert got.loss.item() / 3 == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("shift", "weights", "expected"), [(0.0, [-2.0, 2.0, 0.0], 0.288693), (1.0, [-3.0, 1.0, -1.0], 1.15422)]
)
def test_rlax_entropy_loss(shift, weights, expected):
    """google-deepmind/rlax (Apache-2.0), policy_gradients_test.py: -mean of weighted entropies."""
    entropy = token_entropy(RLAX_LOGITS + shift)[None]
    loss = -aggregate(entropy * f64(weights), full(entropy), "token") / 3
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_verl_multi_turn_invariance():
    """verl (Apache-2.0), test_core_algos_on_cpu.py: values on environment tokens must not matter."""
    rewards = f64([0.0, 0.0, 0.1, 0.1, 0.1, 0.0, 0.0, 0.1, 1.0, 0.0, 0.0])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]]).bool()
    first, second = (torch.randn(1, 11, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    values = torch.where(mask, f64([4.0, 4.0, 5.0, 6.0, 7.0, 4.0, 4.0, 9.0, 8.0, 4.0, 4.0]), first)
    other = torch.where(mask, values, second)
    for got, expected in zip(
        gae(rewards, values, mask, gamma=0.99, lam=0.95), gae(rewards, other, mask, gamma=0.99, lam=0.95), strict=True
    ):
        assert torch.equal(got, expected)


def test_trl_masked_mean():
    """trl (Apache-2.0), tests/test_core.py: values 1, 2, 3, 4 with mask 0, 1, 1, 0."""
    mask = torch.tensor([[False, True, True, False]])
    assert masked_mean(f64([1.0, 2.0, 3.0, 4.0]), mask).item() == 2.5
