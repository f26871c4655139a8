"""Whether a server's vLLM has what we need, and serves the policy that is trained. The server's workers compare."""

import importlib
import json
from typing import Any

from lightning_ppo.errors import EngineError

EXPECTED = "expected"
"""Key of a message that asks for this check."""

_SAME = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Fields of a Hugging Face config that decide which tensors there are, and how long they are."""


def need(module: str, name: str) -> Any:
    """Import one of vLLM's names.

    Raises:
        EngineError: this vLLM does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise EngineError(
            f"vLLM is too old for the weight-update interface ({module}.{name} is missing); install vllm==0.32.*"
        ) from None


def expected_policy(config_json: str, dtype: str, max_context_tokens: int) -> dict[str, Any]:
    """Describe what a server must serve.

    Args:
        config_json: The Hugging Face config of the policy.
        dtype: Precision of the server's weights, by torch's name.
        max_context_tokens: Longest prompt plus response.
    """
    config = json.loads(config_json)
    return {
        "config": {name: config[name] for name in _SAME if config.get(name) is not None},
        "dtype": dtype,
        "max_context_tokens": max_context_tokens,
    }


def check_scheduling(scheduling_policy: str) -> None:
    """Check that a server lets the proof of a refit go before all responses that wait.

    Args:
        scheduling_policy: In what order the server takes requests, by vLLM's name.

    Raises:
        EngineError: in the order in which they come.
    """
    if scheduling_policy != "priority":
        raise EngineError(
            f"scheduling_policy={scheduling_policy} makes the proof of every refit wait for all responses asked for"
            " before; start vLLM with --scheduling-policy priority"
        )


def check_policy(expected: dict[str, Any], hf_config: Any, model_config: Any) -> None:
    """Compare with what this server serves.

    Args:
        expected: What `expected_policy` returned.
        hf_config: Hugging Face config of the server's model.
        model_config: vLLM's config of the model.

    Raises:
        EngineError: they differ, or the server's log-probs are not those of the distribution it samples from.
    """
    for name, value in expected["config"].items():
        served = getattr(hf_config, name, value)
        if served != value:
            raise EngineError(f"model with {name}={served} is served, but the policy has {value}; serve the policy")
    dtype = str(model_config.dtype).removeprefix("torch.")
    if dtype != expected["dtype"]:
        raise EngineError(
            f"dtype={dtype} is served, but vllm.dtype is {expected['dtype']}; set it, or start vLLM with --dtype"
        )
    if model_config.quantization is not None:
        raise EngineError(
            f"quantization={model_config.quantization} is served, so that the trainer's log-probs cannot agree;"
            " start vLLM without --quantization, with a model whose config names none"
        )
    mode = str(getattr(model_config.logprobs_mode, "value", model_config.logprobs_mode))
    if mode != "processed_logprobs":
        raise EngineError(
            f"logprobs_mode={mode} leaves the temperature out, so that the trainer's log-probs cannot agree;"
            " start vLLM with --logprobs-mode processed_logprobs"
        )
    longest = int(model_config.max_model_len)
    if longest < expected["max_context_tokens"]:
        raise EngineError(
            f"max_model_len={longest} is shorter than the {expected['max_context_tokens']} tokens of a prompt with its"
            " response; start vLLM with a higher --max-model-len"
        )
