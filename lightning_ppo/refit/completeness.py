"""Whether an update brought every tensor. vLLM does not ask: what is missing silently keeps its old values."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_ppo.errors import EngineError


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that are another parameter under a second name, which need not be sent."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def check_complete(
    model: nn.Module, loaded: set[str], layer_info: Callable[[nn.Module], Any], whole: tuple[type[nn.Module], ...]
) -> None:
    """Check an update before its layers are finished.

    Args:
        model: vLLM's model, its layers waiting for tensors or done.
        loaded: Names of the model's parameters that the update brought at least a part of, or need not bring.
        layer_info: vLLM's bookkeeping of a layer; `can_load()` is true while it waits for more.
        whole: vLLM's classes of linear layers and experts. Several tensors (q, k and v) may make up one of their
            parameters. Embeddings are padded, so that they may wait for ever.

    Raises:
        EngineError: a parameter got nothing, or only a part of its values.
    """
    _check_names(model, loaded)
    for name, layer in model.named_modules():
        info = layer_info(layer)
        if not isinstance(layer, whole) or not info.can_load():
            continue
        # experts have maps, which nobody sends
        expected = info.load_numel_total - sum(buffer.numel() for buffer in layer.buffers(recurse=False))
        if info.load_numel < expected:
            raise EngineError(
                f"weights={name} got {info.load_numel} of {expected} values in the update; send the whole policy"
            )


def check_copied(model: nn.Module, loaded: set[str], num_copied: int, embedding: type) -> None:
    """Check an update whose tensors were copied straight into the model's parameters.

    Args:
        model: vLLM's model.
        loaded: As in `check_complete`.
        num_copied: Values that were copied.
        embedding: vLLM's base class of embeddings, whose rows are padded.

    Raises:
        EngineError: a parameter got nothing, or only a part of its values.
    """
    _check_names(model, loaded)
    expected = sum(parameter.numel() for parameter in model.parameters())
    embeddings: list[Any] = [layer for layer in model.modules() if isinstance(layer, embedding)]
    # a tied head shares its weight, which counts once
    for layer in {id(layer.weight): layer for layer in embeddings}.values():
        expected -= (layer.num_embeddings_padded - layer.org_vocab_size) * layer.embedding_dim
    if num_copied < expected:
        raise EngineError(f"weights got {num_copied} of {expected} values in the update; send the whole policy")


def _check_names(model: nn.Module, loaded: set[str]) -> None:
    missing = sorted(name for name, _ in model.named_parameters() if name not in loaded)
    if missing:
        raise EngineError(f"weights={missing[0]} is missing in the update; send the whole policy")
