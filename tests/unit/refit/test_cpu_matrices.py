"""Matrices of a server on one CPU, without vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ppo.refit import cpu_matrices
from lightning_ppo.refit.cpu_matrices import CPU_WEIGHTS, Matrix, keep_matrices, matrices_in_place

LARGE, SMALL = (1024, 257), (1024, 255)
"""Shapes of float32 matrices of a little more and a little less than 1 MiB."""


class Packer:
    """Gives layers a product with a copy of their weight, as vLLM does; counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, layer, remove_weight):
        self.count += 1
        copy = layer.weight.clone()
        layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, copy, bias)


def product(matrix, weight, bias=None):
    x = torch.ones(2, weight.shape[1], dtype=weight.dtype)
    return matrix(x, weight, bias), nn.functional.linear(x, weight, bias)


def test_a_large_matrix_is_packed_once_per_refit():
    packer, weight = Packer(), torch.randn(LARGE)
    matrix = Matrix(packer)
    for refit in (1, 2, 3):
        weight.copy_(torch.randn(LARGE))
        matrix.forget()
        for _ in range(2):
            got, expected = product(matrix, weight)
            assert torch.equal(got, expected)
        assert packer.count == refit


def test_without_a_refit_the_copy_is_used():
    packer, weight = Packer(), torch.ones(LARGE)
    matrix = Matrix(packer)
    before, _ = product(matrix, weight)
    weight.zero_()
    assert torch.equal(product(matrix, weight)[0], before)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"), [(SMALL, torch.float32, 0), (LARGE, torch.float32, 1), ((4, 4), torch.bfloat16, 1)]
)
def test_small_float32_matrices_are_not_packed(shape, dtype, expected):
    packer, weight = Packer(), torch.randn(shape).to(dtype)
    got, wanted = product(Matrix(packer), weight)
    assert torch.equal(got, wanted)
    assert packer.count == expected


def test_plain_matrices_are_never_packed():
    weight = torch.randn(LARGE)
    matrix = Matrix(None)
    for _ in range(2):
        weight.mul_(2)
        got, expected = product(matrix, weight)
        assert torch.equal(got, expected)


def test_the_bias_may_change_its_precision_and_is_the_new_one_after_a_refit():
    """As for vLLM's kernels that add a float32 bias to bfloat16 products."""

    def pack(layer, remove_weight):
        layer.bias.data = layer.bias.float()
        layer.cpu_linear = lambda x, weight, bias: (x.float() @ weight.float().T + bias, bias.dtype)

    weight, bias = torch.zeros(3, 2, dtype=torch.bfloat16), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    matrix = Matrix(pack)
    for value in (1.0, 2.0):
        with torch.no_grad():
            bias.fill_(value)
        matrix.forget()
        got, dtype = matrix(torch.zeros(1, 2, dtype=torch.bfloat16), weight, bias)
        assert dtype == torch.float32
        assert got.tolist() == [[value] * 3]
        assert bias.dtype == torch.bfloat16


class Attention(nn.Module):
    def process_weights_after_loading(self, dtype):
        """Scales of quantised keys and values."""


class Absorbing(Attention):
    def process_weights_after_loading(self, dtype):
        """Derives products of its weights."""


class Unquantized:
    """A method of layers that vLLM does not quantise."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """What of vLLM is looked at, and the module whose function is replaced."""
    packer, utils = Packer(), ModuleType("vllm.model_executor.layers.utils")
    utils.dispatch_cpu_unquantized_gemm = packer
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    names = {
        "Attention": Attention,
        "UnquantizedLinearMethod": Unquantized,
        "UnquantizedEmbeddingMethod": Unquantized,
        "dispatch_cpu_unquantized_gemm": packer,
    }
    monkeypatch.setattr(cpu_matrices, "need", lambda module, name: names[name])
    monkeypatch.setenv(CPU_WEIGHTS, "packed")
    return utils


class Layer(nn.Module):
    def __init__(self, *shape, method=Unquantized):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.quant_method = method()


def loaded(*layers):
    """A model whose layers got their products as vLLM gives them after a load."""
    for layer in layers:
        if isinstance(getattr(layer, "quant_method", None), Unquantized):
            sys.modules["vllm.model_executor.layers.utils"].dispatch_cpu_unquantized_gemm(layer, True)
    return nn.Sequential(nn.LayerNorm(2), *layers)


@pytest.mark.parametrize("is_packed", [True, False])
def test_weights_of_plain_layers_are_loaded_in_place(is_packed, vllm):
    packer = vllm.dispatch_cpu_unquantized_gemm
    keep_matrices(is_packed=is_packed)
    first, second = Layer(*LARGE), Layer(*LARGE)
    assert matrices_in_place(loaded(first, Attention(), second)) == [first.cpu_linear, second.cpu_linear]
    # the weight is still there, and nothing is packed before it is used
    assert (first.weight.shape, packer.count) == (LARGE, 0)
    product(first.cpu_linear, first.weight)
    assert packer.count == is_packed


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: Layer(2, 2, method=SimpleNamespace), id="another method, as experts have"),
        pytest.param(lambda: Layer(2, 1, 4), id="a convolution, which vLLM packs itself"),
        pytest.param(Absorbing, id="attention with products of weights"),
        pytest.param(lambda: nn.Sequential(Absorbing()), id="the same, deeper"),
    ],
)
def test_layers_with_something_derived_from_their_weights_need_vllms_own_load(layer):
    keep_matrices(is_packed=True)
    assert matrices_in_place(loaded(Layer(*SMALL))) is not None
    assert matrices_in_place(loaded(Layer(*SMALL), layer())) is None


def test_a_model_with_a_step_after_loading_needs_vllms_own_load():
    keep_matrices(is_packed=True)
    model = loaded(Layer(*SMALL))
    model.process_weights_after_loading = lambda: None
    assert matrices_in_place(model) is None


def test_without_the_setting_vllm_loads_its_own_way(monkeypatch):
    monkeypatch.delenv(CPU_WEIGHTS)
    assert matrices_in_place(loaded(Layer(*SMALL))) is None
