"""What the policy looks like before its weights arrive: its config, and the names and shapes of its tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_ppo.errors import EngineError

# transformers leaves it untyped.
build_model: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
_NATIVE_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Their frequencies depend on the longest sequence of the batch once it exceeds the length the model was trained for.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Skeleton:
    """A policy without memory: transformers' model on the meta device."""

    config: Any
    model: nn.Module
    aliases: Mapping[str, str]
    """Every name of a state dict, and the canonical name of the tensor behind it (tied tensors share one)."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by canonical name."""

    @classmethod
    def of(cls, config_json: str) -> Self:
        """Read a config as `PolicySpec` carries it.

        Raises:
            EngineError: transformers has no causal language model for it.
        """
        fields = json.loads(config_json)
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise EngineError(f"model_type={model_type} is unknown to transformers; use an architecture it ships")
        config = CONFIG_MAPPING[model_type].from_dict(fields)
        try:
            with torch.device("meta"):
                model = build_model(config)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise EngineError(f"model_type={model_type} has no causal language model: {reason}") from error
        aliases: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            canonical = first.setdefault(id(tensor), name)
            aliases[name] = canonical
            shapes[canonical] = tuple(tensor.shape)
        return cls(config, model, aliases, shapes)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.config.get_text_config().vocab_size)

    def canonical(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename tied tensors to their canonical names and check that nothing is missing or of another shape.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            target = self.aliases.get(name)
            if target is None:
                raise EngineError(
                    f"weights={name} is not a tensor of the {self.config.model_type} policy; send its state dict"
                )
            if tuple(tensor.shape) != self.shapes[target]:
                raise EngineError(
                    f"weights={name} has shape {list(tensor.shape)} where the policy's config has"
                    f" {list(self.shapes[target])}; send the weights of this config"
                )
            if name == target or target not in found:
                found[target] = tensor
        missing = sorted(self.shapes.keys() - found.keys())
        if missing:
            raise EngineError(f"weights={missing[0]} is missing ({len(missing)} in all); send the whole state dict")
        return found

    def native_problem(self, max_context_tokens: int) -> str | None:
        """Why the fast decoder cannot serve this policy; None if it can."""
        config, kind = self.config, type(self.model).__name__
        if kind not in _NATIVE_CLASSES:
            return "is not a Llama-, Mistral-, Qwen2- or Qwen3-style model"
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None)
        slides = layer_types is None or any(kind != "full_attention" for kind in layer_types)
        if window is not None and slides and window < max_context_tokens:
            return f"uses a sliding window of {window} tokens"
        if layer_types is not None and set(layer_types) - {"full_attention", "sliding_attention"}:
            return "mixes other kinds of attention"
        rope = config.rope_parameters
        if not isinstance(rope, dict) or "rope_type" not in rope:
            return "has different rotary embeddings in different layers"
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope["rope_type"] in _LENGTH_DEPENDENT_ROPE and max_context_tokens > original:
            return f"has rotary embeddings that change beyond {original} tokens"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "rotates a part of each head only"
        if getattr(config, "quantization_config", None) is not None:
            return "is quantised"
        return None
