"""How a vLLM server on one CPU keeps matrices: as they are sent, with packed copies made when they are first used.

vLLM packs every matrix for its CPU kernels as part of a load, keeps the packed copy only, and so has to take the whole
model apart for the next load. Here weights are loaded in place, and what a refit makes stale is packed again by the
first forward pass that needs it. vLLM is imported inside functions only.
"""

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ppo.refit.compatibility import need

CPU_WEIGHTS = "LIGHTNING_PPO_CPU_WEIGHTS"
"""Environment variable: `packed` or `plain`; unset, matrices are kept vLLM's way."""

_SMALL_BYTES = 1024 * 1024
"""Below this, torch multiplies by a plain float32 matrix as fast as oneDNN by a packed one, or faster."""

Pack = Callable[[Any, bool], None]
"""vLLM's way to give a layer the product of its choice, `layer.cpu_linear`."""


class Matrix:
    """The product of one layer: `layer.cpu_linear(x, layer.weight, bias)`."""

    def __init__(self, pack: Pack | None) -> None:
        """Nothing is packed yet.

        Args:
            pack: vLLM's function; None never packs.
        """
        self._pack = pack
        self._packed: Any = None
        self._is_stale = True

    # A compiled graph would go on with the copy that it was traced with.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply.

        Args:
            x: `[..., K]`.
            weight: `[N, K]`.
            bias: `[N]`.
        """
        if self._pack is None or _is_small(weight):
            return nn.functional.linear(x, weight, bias)
        if self._is_stale:
            # Freed just before, its memory serves for the new copy, and need not be mapped anew.
            self._packed = None
            # Some of vLLM's kernels want the bias in another precision, and put it into the layer.
            own_bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
            layer = SimpleNamespace(weight=weight, bias=own_bias)
            self._pack(layer, False)
            self._packed, self._is_stale = layer, False
        product: Tensor = self._packed.cpu_linear(x, weight, self._packed.bias)
        return product

    def forget(self) -> None:
        """Have the next product pack the weight as it is then."""
        self._is_stale = True


def keep_matrices(*, is_packed: bool) -> None:
    """Have vLLM load into plain matrices from now on; it has no setting for it (0.32).

    Args:
        is_packed: Whether large ones get a packed copy when they are used.

    Raises:
        EngineError: vLLM is too old.
    """
    name = "vllm.model_executor.layers.utils"
    pack: Pack = need(name, "dispatch_cpu_unquantized_gemm")
    utils: Any = importlib.import_module(name)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            # no matrix: a convolution, or experts
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = Matrix(pack if is_packed else None)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def matrices_in_place(model: nn.Module) -> list[Matrix] | None:
    """Find the matrices of a model whose weights can be overwritten where they are.

    Returns:
        Its matrices; None if vLLM must load the model anew: because matrices are kept its way, or because some layer
        computes with something that was derived from its weights.

    Raises:
        EngineError: vLLM is too old.
    """
    if CPU_WEIGHTS not in os.environ:
        return None
    layers = "vllm.model_executor.layers"
    attention = need(f"{layers}.attention", "Attention")
    known = (
        need(f"{layers}.linear", "UnquantizedLinearMethod"),
        need(f"{layers}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    )
    matrices = []
    for layer in model.modules():
        matrix = getattr(layer, "cpu_linear", None)
        if isinstance(matrix, Matrix):
            matrices.append(matrix)
        elif isinstance(layer, attention):
            # what it derives are scales of quantised keys and values
            if type(layer).process_weights_after_loading is not attention.process_weights_after_loading:
                return None
        elif hasattr(layer, "process_weights_after_loading"):
            return None
        else:
            method = getattr(layer, "quant_method", None)
            if method is not None and (type(method) not in known or layer.weight.ndim != 2):
                return None
    return matrices


def _is_small(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.nbytes < _SMALL_BYTES
