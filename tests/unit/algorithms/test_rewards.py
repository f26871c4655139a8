import math

import pytest
import torch

from lightning_ppo.algorithms import gae, kl_estimate, token_rewards

MASK = torch.tensor([[True, True, False, False], [True, False, True, False], [False] * 4])
REWARDS = torch.tensor([1.0, -2.0, 5.0])


def test_scalar_lands_on_the_last_valid_token():
    expected = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0], [0.0] * 4]
    assert token_rewards(REWARDS, MASK).tolist() == expected


def test_kl_is_charged_on_valid_tokens_only():
    kl = torch.arange(12.0).view(3, 4)
    got = token_rewards(REWARDS, MASK, kl, 0.5)
    assert got.tolist() == [[0.0, 1.0 - 0.5, 0.0, 0.0], [-2.0, 0.0, -2.0 - 3.0, 0.0], [0.0] * 4]


def test_equal_logprobs_change_nothing_and_differing_ones_do():
    """Golden rows 'KL in reward': equal log-probs, differing log-probs, flag off."""
    logprobs = torch.tensor([[-1.0, -2.0, -0.5, -3.0]] * 3)
    plain = token_rewards(REWARDS, MASK)
    same = kl_estimate(logprobs, logprobs, "k3")
    other = kl_estimate(logprobs, logprobs - 1.0, "k3")
    assert torch.equal(token_rewards(REWARDS, MASK, same, 0.1), plain)
    assert torch.equal(token_rewards(REWARDS, MASK, other, 0.0), plain)
    assert (token_rewards(REWARDS, MASK, other, 0.1) < plain)[MASK].all()


def test_inputs_are_not_modified():
    """Pitfall 5: in-place `kl *= coef` and adding the reward corrupt the logged KL."""
    kl = torch.arange(12.0).view(3, 4)
    before = [kl.clone(), REWARDS.clone(), MASK.clone()]
    token_rewards(REWARDS, MASK, kl, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, [kl, REWARDS, MASK], strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_kl_at_masked_tokens_does_not_reach_the_returns(poison):
    """Pitfall 7: the KL on masked tool tokens leaks into the returns."""
    kl = torch.full((3, 4), 0.25)
    values = torch.zeros(3, 4)
    clean = gae(token_rewards(REWARDS, MASK, kl, 0.5), values, MASK, gamma=1.0, lam=1.0)
    poisoned_kl = kl.masked_fill(~MASK, poison)
    poisoned = gae(token_rewards(REWARDS, MASK, poisoned_kl, 0.5), values, MASK, gamma=1.0, lam=1.0)
    assert torch.equal(clean[1], poisoned[1])
    assert torch.equal(clean[0], poisoned[0])


def test_reward_of_a_fully_masked_row_may_be_anything():
    rewards = torch.tensor([1.0, -2.0, math.nan])
    assert torch.equal(token_rewards(rewards, MASK), token_rewards(REWARDS, MASK))


def test_no_tokens_at_all():
    assert token_rewards(REWARDS, torch.zeros(3, 0, dtype=torch.bool)).shape == (3, 0)


def test_coefficient_without_kl_is_an_error():
    with pytest.raises(ValueError, match=r"^kl_coef=0\.1 has no KL"):
        token_rewards(REWARDS, MASK, None, 0.1)


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match=r"^rewards\.shape=\(3, 1\)"):
        token_rewards(REWARDS[:, None], MASK)
    with pytest.raises(ValueError, match=r"^kl\.shape=\(4,\)"):
        token_rewards(REWARDS, MASK, torch.zeros(4), 0.1)
