import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.algorithms import aggregate, kl_loss_terms, policy_loss, value_loss

QUICK = settings(max_examples=60, deadline=None, database=None)
LEVELS = ["token", "sequence"]
POISON = [math.nan, math.inf, -math.inf, 1e30]


def f64(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def batch(seed, rows=8, width=9):
    """Random tensors with ragged rows, holes, and one row without any valid token."""
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages, values, returns = torch.randn(5, rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
    mask[rows // 2] = False
    return old - 2, old - 2 + 0.5 * noise, advantages, values, returns, mask


def textbook_policy_loss(new, old, advantages, mask, low, high, dual, weights, level):
    """Equation by equation, over the valid tokens of each row only."""
    total = new.new_zeros(())
    for row in range(len(mask)):
        keep = mask[row]
        if not keep.any():
            continue
        ratio, adv = (new[row][keep] - old[row][keep]).exp(), advantages[row][keep]
        loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
        if dual is not None:
            loss = torch.where(adv < 0, torch.min(loss, -adv * dual), loss)
        loss = loss * weights[row][keep]
        total = total + (loss.sum() if level == "token" else loss.mean())
    return total


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(LEVELS), st.sampled_from([None, 0.28]), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_and_gradient_equal_the_textbook(seed, level, high, dual):
    old, new, advantages, _, _, mask = batch(seed)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    got = policy_loss(
        ours, old, advantages, mask, clip_eps=0.2, clip_eps_high=high, dual_clip=dual, level=level, weights=weights
    )
    expected = textbook_policy_loss(theirs, old, advantages, mask, 0.2, high or 0.2, dual, weights, level)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)
    got.loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@QUICK
@given(st.integers(0, 2**31), st.sampled_from(LEVELS), st.integers(1, 8))
def test_micro_batches_sum_to_the_whole(seed, level, size):
    """Pitfall 23: a loss normalised per micro-batch multiplies the gradient; here sums, whatever the micro-batches."""
    old, new, advantages, values, returns, mask = batch(seed)

    def grads(chunks):
        leaves = [new.clone().requires_grad_(), values.clone().requires_grad_()]
        for rows in chunks:
            policy = policy_loss(leaves[0][rows], old[rows], advantages[rows], mask[rows], clip_eps=0.2, level=level)
            kl = aggregate(kl_loss_terms(leaves[0][rows], old[rows], mask[rows], "k3"), mask[rows], level)
            critic = value_loss(leaves[1][rows], returns[rows] * 0, returns[rows], mask[rows], clip_eps=0.3)
            (policy.loss + 0.1 * kl + critic.loss).backward()
        return [leaf.grad for leaf in leaves]

    whole = grads([slice(0, 8)])
    parts = grads([slice(start, start + size) for start in range(0, 8, size)])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_critic_gradient_is_the_same_for_every_micro_batch_size(size):
    """Pitfall 23, through a shared parameter and with a ragged last micro-batch (7 rows)."""
    _, _, _, features, returns, mask = batch(3, rows=7)

    def grad(step):
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        for start in range(0, 7, step):
            rows = slice(start, start + step)
            loss = value_loss(weight * features[rows], features[rows], returns[rows], mask[rows], clip_eps=0.2).loss
            (loss / mask.sum()).backward()
        return weight.grad

    torch.testing.assert_close(grad(size), grad(7), rtol=1e-13, atol=0)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("level", LEVELS)
def test_masked_positions_change_nothing(poison, level):
    """Pitfalls 4 and 47: padding advantages in the sequence mean, and NaN times 0, in values and gradients."""
    old, new, advantages, values, returns, mask = batch(1)
    weights = torch.full_like(old, 0.5)

    def run(fill):
        tensors = [x.masked_fill(~mask, fill) for x in (new, old, advantages, weights, values, returns, values + 1)]
        new_leaf, value_leaf = tensors[0].requires_grad_(), tensors[4].requires_grad_()
        policy = policy_loss(
            new_leaf, tensors[1], tensors[2], mask, clip_eps=0.2, dual_clip=2.0, level=level, weights=tensors[3]
        )
        critic = value_loss(value_leaf, tensors[6], tensors[5], mask, clip_eps=0.2)
        (policy.loss + critic.loss).backward()
        sums = [policy.loss, policy.clipped_tokens, policy.ratio_sum, policy.approx_kl_sum]
        return [*sums, critic.loss, critic.clipped_tokens, new_leaf.grad, value_leaf.grad]

    for clean, dirty in zip(run(0.0), run(poison), strict=True):
        assert torch.equal(clean, dirty)


def test_padding_advantages_of_ten_change_nothing():
    """Pitfall 4, the reported numbers: the loss went from -1 to -11."""
    mask = torch.tensor([[True, False, False]])
    zeros = torch.zeros(1, 3)
    got = policy_loss(zeros, zeros, torch.tensor([[1.0, 10.0, 10.0]]), mask, clip_eps=0.2, level="sequence")
    assert got.loss.item() == -1.0


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_fully_masked_micro_batch_backpropagates_zeros(shape, level):
    """Pitfalls 35 and 37: a zero-token batch has loss 0 and gradient 0, and its loss still hangs on the graph."""
    leaf = torch.full(shape, math.nan, requires_grad=True)
    rest, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    policy = policy_loss(leaf, rest, rest, mask, clip_eps=0.2, dual_clip=3.0, level=level, weights=rest)
    critic = value_loss(leaf, rest, rest, mask, clip_eps=0.2)
    kl = aggregate(kl_loss_terms(leaf, rest, mask, "k3"), mask, level)
    for loss in (policy.loss, critic.loss, kl, aggregate(leaf * 2, mask, level)):
        assert loss.requires_grad
        assert loss.item() == 0.0
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.eq(0).all()
    assert policy.clipped_tokens == policy.ratio_sum == policy.approx_kl_sum == critic.clipped_tokens == 0


def test_closed_form_of_each_aggregation():
    """Pitfall 41: double division in the sequence-mean modes."""
    x = torch.tensor([[1.0, 2.0, 6.0, 50.0], [4.0, 50.0, 50.0, 50.0], [50.0] * 4])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
    assert aggregate(x, mask, "token").item() == 13.0
    assert aggregate(x, mask, "sequence").item() == 7.0
    with pytest.raises(ValueError, match=r"^level=batch is unknown; choose one of token, sequence$"):
        aggregate(x, mask, "batch")


def test_statistics_are_of_the_unclipped_ratio():
    """Pitfall 50: 'ppo_kl' logged from the ratio, or from the clamped ratio. Closed form of both statistics."""
    log_ratio = [math.log(0.5), math.log(3.0), 0.1, 99.0]
    mask = torch.tensor([[True, True, True, False]])
    got = policy_loss(f64(*log_ratio).requires_grad_(), f64(0, 0, 0, 0), f64(-1, 1, 1, 1), mask, clip_eps=0.2)
    assert got.ratio_sum.item() == pytest.approx(0.5 + 3.0 + math.exp(0.1), rel=1e-12)
    assert got.approx_kl_sum.item() == pytest.approx(-(math.log(0.5) + math.log(3.0) + 0.1), rel=1e-12)
    assert got.clipped_tokens.item() == 2
    for sums in (got.ratio_sum, got.approx_kl_sum, got.clipped_tokens):
        assert sums.dtype == torch.float64
        assert not sums.requires_grad


def test_first_epoch_has_ratio_one_and_the_plain_policy_gradient():
    new = f64(-1.0, -2.0).requires_grad_()
    got = policy_loss(new, new.detach(), f64(0.5, -3.0), torch.ones(1, 2).bool(), clip_eps=0.2)
    got.loss.backward()
    assert new.grad.tolist() == [[-0.5, 3.0]]
    assert got.ratio_sum.item() == 2.0
    assert got.clipped_tokens.item() == 0


@pytest.mark.parametrize(("advantage", "dual"), [(1.0, None), (0.0, None), (-1.0, 3.0)])
def test_an_overflowing_ratio_that_is_clipped_has_no_gradient(advantage, dual):
    new = torch.tensor([[200.0, -1.0]], requires_grad=True)
    adv = torch.tensor([[advantage, 1.0]])
    got = policy_loss(new, torch.tensor([[0.0, -1.0]]), adv, torch.ones(1, 2).bool(), clip_eps=0.2, dual_clip=dual)
    got.loss.backward()
    assert got.loss.isfinite()
    assert new.grad.tolist() == [[0.0, -1.0]]


def test_a_token_without_advantage_is_not_counted_as_clipped():
    got = policy_loss(f64(1.0, -1.0), f64(0.0, 0.0), f64(0.0, -1.0), torch.ones(1, 2).bool(), clip_eps=0.2)
    assert got.clipped_tokens.item() == 1


def test_an_overflow_that_nothing_clips_stays_visible():
    got = policy_loss(
        torch.tensor([[200.0]]), torch.zeros(1, 1), torch.tensor([[-1.0]]), torch.ones(1, 1).bool(), clip_eps=0.2
    )
    assert got.loss.item() == math.inf


@pytest.mark.parametrize("field", ["new", "old", "advantage", "value", "return"])
def test_a_valid_nan_stays_visible(field):
    number = dict.fromkeys(["new", "old", "advantage", "value", "return"], f64(0.0, 0.0)) | {field: f64(math.nan, 0.0)}
    mask = torch.ones(1, 2).bool()
    policy = policy_loss(number["new"], number["old"], number["advantage"], mask, clip_eps=0.2, dual_clip=2.0)
    critic = value_loss(number["value"], f64(0.0, 0.0), number["return"], mask, clip_eps=0.2)
    assert (policy.loss + critic.loss).isnan()


@pytest.mark.parametrize("log_ratio", [200.0, math.inf])
def test_a_token_of_weight_zero_leaves_no_trace(log_ratio):
    """Neither does its ratio overflow into a NaN: no clip discards it where the advantage is negative."""
    mask = torch.ones(1, 2).bool()
    new = f64(log_ratio, 0.1).requires_grad_()
    loss = policy_loss(new, f64(0.0, 0.0), f64(-1.0, -1.0), mask, clip_eps=0.2, weights=f64(0.0, 0.5)).loss
    loss.backward()
    alone = policy_loss(f64(0.1), f64(0.0), f64(-1.0), torch.ones(1, 1).bool(), clip_eps=0.2, weights=f64(0.5)).loss
    assert loss.item() == alone.item()
    assert new.grad.tolist() == [[0.0, pytest.approx(0.5 * math.exp(0.1))]]


@pytest.mark.parametrize("dual", [1.0, 0.5, math.nan])
def test_dual_clip_must_be_above_one(dual):
    with pytest.raises(ValueError, match=r"^dual_clip="):
        policy_loss(f64(0.0), f64(0.0), f64(0.0), torch.ones(1, 1).bool(), clip_eps=0.2, dual_clip=dual)


def test_only_the_policy_and_the_critic_get_gradients():
    leaves = [f64(0.1, 0.2).requires_grad_() for _ in range(4)]
    mask = torch.ones(1, 2).bool()
    new = f64(0.0, 0.3).requires_grad_()
    policy_loss(new, leaves[0], leaves[1], mask, clip_eps=0.2, weights=leaves[2]).loss.backward()
    value_loss(new, leaves[3], leaves[1], mask, clip_eps=0.05).loss.backward()
    assert all(leaf.grad is None for leaf in leaves)


def test_value_loss_properties():
    """Golden row 'value loss': perfect prediction gives 0, clipped >= unclipped, linear in the scale, no singleton."""
    _, _, _, values, returns, mask = batch(5)
    old = values + 0.5 * returns
    plain = value_loss(values, old, returns, mask)
    clipped = value_loss(values, old, returns, mask, clip_eps=0.1)
    assert value_loss(returns, old, returns, mask).loss.item() == 0.0
    assert clipped.loss > plain.loss
    assert clipped.clipped_tokens > 0
    assert plain.clipped_tokens == 0
    torch.testing.assert_close(value_loss(values, old, returns, mask, scale=3.0).loss, 3 * plain.loss)
    assert value_loss(values, old, returns, mask, clip_eps=0.0).loss == plain.loss
    with pytest.raises(ValueError, match=r"^values\.shape=\(8, 9, 1\)"):
        value_loss(values[..., None], old, returns, mask)


def test_value_clip_by_hand():
    """V = 2, old V = 1, eps = .5: clipped to 1.5. Target 0: the plain error wins; target 3: the clipped one does."""
    values = f64(2.0, 2.0, 1.2).requires_grad_()
    mask = torch.ones(1, 3).bool()
    got = value_loss(values, f64(1.0, 1.0, 1.0), f64(0.0, 3.0, 0.0), mask, clip_eps=0.5)
    got.loss.backward()
    assert got.loss.item() == pytest.approx(0.5 * (4.0 + 2.25 + 1.44), rel=1e-12)
    assert got.clipped_tokens.item() == 1
    torch.testing.assert_close(values.grad, f64(2.0, 0.0, 1.2))


def test_inputs_are_not_modified():
    """Pitfall 5: nothing is changed in place."""
    old, new, advantages, values, returns, mask = tensors = batch(2)
    before = [x.clone() for x in tensors]
    policy_loss(new, old, advantages, mask, clip_eps=0.2, dual_clip=2.0, weights=values.abs(), level="sequence")
    value_loss(values, old, returns, mask, clip_eps=0.2)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_wrong_shapes_are_errors():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^advantages\.shape=\(2, 1\)"):
        policy_loss(x, x, x[:, :1], mask, clip_eps=0.2)
    with pytest.raises(ValueError, match=r"^weights\.shape=\(2, 1\)"):
        policy_loss(x, x, x, mask, clip_eps=0.2, weights=x[:, :1])
    with pytest.raises(ValueError, match=r"^per_token\.shape=\(3,\)"):
        aggregate(x[0], mask, "token")
