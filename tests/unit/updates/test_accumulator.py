"""Flat buffers: which parameters count, in which precision, and when they may be touched."""

import pytest
import torch
from torch import nn

from lightning_ppo.accumulator import GradientAccumulator, clip_to_norm
from lightning_ppo.errors import UpdateInProgressError


def _accumulator(*parameters, reduce=lambda tensor: None):
    return GradientAccumulator(parameters, reduce)


def _accumulate(accumulator, *losses, buffer="main"):
    accumulator.begin()
    for loss in losses:
        with accumulator.capture(buffer):
            loss().backward()
    return accumulator.close({buffer: 1.0})


def test_tied_parameters_count_once_and_get_both_parts():
    embedding = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight

    def loss():
        return head(embedding(torch.tensor([1, 2]))).square().sum()

    loss().backward()
    wanted = embedding.weight.grad.clone()
    flat = _accumulate(_accumulator(embedding.weight, head.weight), loss)
    assert flat.shape == (15,)
    torch.testing.assert_close(flat.view(5, 3), wanted)


def test_frozen_parameters_are_skipped():
    free, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3), requires_grad=False)
    accumulator = _accumulator(frozen, free)
    flat = _accumulate(accumulator, lambda: free.sum() * frozen.sum())
    assert torch.equal(flat, torch.full((2,), 3.0))
    with accumulator.as_grads(flat):
        assert frozen.grad is None


def test_a_parameter_without_gradient_gets_zeros():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    accumulator = _accumulator(used, unused)
    flat = _accumulate(accumulator, lambda: used.sum())
    assert torch.equal(flat, torch.tensor([1.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ([torch.float32], torch.float32),
        ([torch.float64], torch.float64),
        ([torch.bfloat16], torch.float32),
        ([torch.float64, torch.float32], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
    ],
)
def test_dtype_of_the_buffer_and_of_the_gradients(dtypes, wanted):
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    accumulator = _accumulator(*parameters)
    flat = _accumulate(accumulator, lambda: sum(p.sum().double() for p in parameters))
    assert flat.dtype == wanted
    assert torch.equal(flat, torch.ones_like(flat))
    with accumulator.as_grads(flat):
        assert [p.grad.dtype for p in parameters] == dtypes
    assert all(p.grad is None for p in parameters)


def test_many_small_bfloat16_gradients_do_not_vanish():
    """In bfloat16, 1 + 2^-9 is 1: a sum of its own precision would stand still."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    accumulator = _accumulator(weight)
    accumulator.begin()
    for scale in [1.0] + [2.0**-9] * 512:
        with accumulator.capture("main"):
            (weight * scale).sum().backward()
    assert torch.equal(accumulator.close({"main": 1.0}), torch.full((2,), 2.0))


def test_several_backward_passes_in_one_capture_and_over_captures():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    accumulator = _accumulator(weight)
    accumulator.begin()
    for _ in range(2):
        with accumulator.capture("main"):
            weight.sum().backward()
            weight.square().sum().backward()
    assert torch.equal(accumulator.close({"main": 0.5}), torch.tensor([3.0, 5.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_may_replace_grad(dtype):
    """With create_graph autograd makes a new tensor instead of adding to the one it finds."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    accumulator = _accumulator(weight)
    accumulator.begin()
    for _ in range(3):
        with accumulator.capture("main"):
            grad = torch.autograd.grad(weight.square().sum(), weight)[0]
            weight.grad = grad if weight.grad is None else weight.grad + grad
    assert torch.equal(accumulator.close({"main": 1.0}), torch.tensor([6.0, 12.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_are_not_contiguous(dtype):
    """The flat gradient has the order of the parameter's indices, whatever its strides (verl 6919)."""
    weight = nn.Parameter(torch.randn(3, 4, dtype=dtype).t())
    assert not weight.is_contiguous()
    factors = torch.arange(12.0).view(4, 3).to(dtype)
    accumulator = _accumulator(weight)
    flat = _accumulate(accumulator, lambda: (weight * factors).sum(), lambda: (weight * factors).sum())
    assert torch.equal(flat, 2 * torch.arange(12.0))
    with accumulator.as_grads(flat):
        assert torch.equal(weight.grad, 2 * factors)


@pytest.mark.parametrize("fused", [True, False])
def test_optimizers_step_parameters_that_are_not_contiguous(fused):
    """Fused kernels walk through memory: a gradient of other strides would go to other elements, without a word."""
    start = torch.arange(12.0).view(4, 3)
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())]
    assert [weight.is_contiguous() for weight in weights] == [True, False]
    for weight in weights:
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        accumulator = _accumulator(weight)
        for step in range(2):
            flat = _accumulate(accumulator, lambda weight=weight, step=step: (weight * (start - 5 - step)).sum())
            with accumulator.as_grads(flat):
                assert weight.grad.stride() == weight.stride()
                optimizer.step()
    assert torch.equal(*weights)


def test_sparse_embedding_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    accumulator = _accumulator(embedding.weight)

    def loss():
        return embedding(torch.tensor([1, 1, 3])).sum()

    flat = _accumulate(accumulator, loss, loss)
    assert torch.equal(flat.view(4, 2)[:, 0], torch.tensor([0.0, 4.0, 0.0, 2.0]))


def test_buffers_are_combined_and_reduced_once_each():
    weight = nn.Parameter(torch.ones(2))
    seen = []

    def reduce(tensor):
        seen.append(tensor.clone())
        tensor.mul_(2)

    accumulator = _accumulator(weight, reduce=reduce)
    accumulator.begin()
    with accumulator.capture("main"):
        weight.sum().backward()
    with accumulator.capture("other"):
        (10 * weight).sum().backward()
    flat = accumulator.close({"main": 1.0, "other": 0.5, "never filled": 7.0})
    assert torch.equal(flat, torch.full((2,), 12.0))
    assert [float(x[0]) for x in seen] == [1.0, 10.0, 0.0]


def test_a_new_step_begins_at_zero():
    weight = nn.Parameter(torch.ones(2))
    accumulator = _accumulator(weight)
    _accumulate(accumulator, lambda: (weight * float("nan")).sum())
    assert torch.equal(_accumulate(accumulator, lambda: weight.sum()), torch.ones(2))
    accumulator.begin()
    assert accumulator.is_finite()
    assert torch.equal(accumulator.close({"main": 1.0}), torch.zeros(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_is_finite(value):
    weight = nn.Parameter(torch.ones(2))
    accumulator = _accumulator(weight)
    accumulator.begin()
    with accumulator.capture("main"):
        weight.sum().backward()
    assert accumulator.is_finite()
    with accumulator.capture("other"):
        (weight[0] * value).backward()
    assert not accumulator.is_finite()


def test_what_is_refused_and_when():
    weight = nn.Parameter(torch.ones(2))
    accumulator = _accumulator(weight)
    with pytest.raises(UpdateInProgressError, match="call begin"), accumulator.capture("main"):
        pass
    with pytest.raises(UpdateInProgressError, match="begin one"):
        accumulator.close({"main": 1.0})
    assert not accumulator.is_open
    accumulator.begin()
    assert accumulator.is_open
    with pytest.raises(UpdateInProgressError, match="open already"):
        accumulator.begin()
    with pytest.raises(UpdateInProgressError, match="would lose"):
        accumulator.release()
    accumulator.abort()
    accumulator.abort()
    accumulator.release()
    assert torch.equal(_accumulate(accumulator, lambda: weight.sum()), torch.ones(2))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("max_norm", [5e-5, 0.5, 1.0, None])
def test_clip_is_that_of_torch(scale, max_norm):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (2, 2, 2)]]
    flat = torch.randn(25) * scale
    accumulator = _accumulator(*parameters)
    with accumulator.as_grads(flat.clone()):
        limit = float("inf") if max_norm is None else max_norm
        total = torch.nn.utils.clip_grad_norm_(parameters, limit)
        wanted = torch.cat([p.grad.reshape(-1) for p in parameters])
    norm = clip_to_norm(flat, max_norm)
    assert norm == pytest.approx(float(total), rel=1e-6)
    torch.testing.assert_close(flat, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_clip_leaves_what_is_not_finite_to_the_caller(value):
    flat = torch.tensor([1.0, value])
    assert not clip_to_norm(flat, 1.0) < float("inf")
    assert float(flat[0]) == 1.0
