"""Tiny models of several families, and ragged trajectories."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

from lightning_ppo.batch import Trajectory

VOCABULARY = 11
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def family(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model: `llama`, `tied llama`, `gpt2`, `gemma2` (caps logits), `cohere` (scales)."""
    if name == "llama":
        return LlamaConfig(**SHAPE | changes)
    if name == "tied llama":
        return LlamaConfig(**SHAPE | {"tie_word_embeddings": True} | changes)
    if name == "gpt2":
        gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        shared = {key: SHAPE[key] for key in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
        return GPT2Config(**gpt2 | shared | changes)
    if name == "gemma2":
        return Gemma2Config(**SHAPE | {"head_dim": 8, "final_logit_softcapping": 2.0} | changes)
    return CohereConfig(**SHAPE | {"logit_scale": 0.25} | changes)


def causal_lm(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family(name, **changes)).to(dtype)


def token_classifier(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForTokenClassification.from_config(family(name, num_labels=1, **changes)).to(dtype)


def trajectory(prompt: list[int], response: list[int], mask: list[bool] | None = None, name: str = "s") -> Trajectory:
    length = len(response)
    return Trajectory(
        sample_id=name,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(response),
        response_mask=torch.tensor(mask if mask is not None else [True] * length, dtype=torch.bool),
        rollout_logprobs=torch.zeros(length),
        policy_versions=torch.zeros(length, dtype=torch.int64),
        reward=0.0,
        finish_reason="stop",
        response_text="",
    )


def ragged(count: int, seed: int = 0) -> list[Trajectory]:
    """Rows with holes in the mask; token 0, which also fills padding, occurs in prompts and responses."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    rows = []
    for index in range(count):
        prompt, response = numbers(1, 6, 2)
        mask = (torch.rand(response, generator=generator) < 0.7).tolist()
        rows.append(
            trajectory(
                numbers(0, VOCABULARY, prompt), numbers(0, VOCABULARY, response), [*mask[:-1], True], f"s{index}"
            )
        )
    return rows


def full_logprobs(model: PreTrainedModel, row: Trajectory, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[T]` of one row from the model's own forward pass, 0 where not generated."""
    ids = torch.cat([row.prompt_ids, row.response_ids])
    logits = model(input_ids=ids[None]).logits[0, len(row.prompt_ids) - 1 : -1]
    table = torch.log_softmax(logits.double() / temperature, -1)
    logprobs = table.gather(-1, row.response_ids[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
    return torch.where(row.response_mask, logprobs, 0.0), torch.where(row.response_mask, entropy, 0.0)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """Everything above."""
    return SimpleNamespace(
        causal_lm=causal_lm,
        family=family,
        full_logprobs=full_logprobs,
        ragged=ragged,
        token_classifier=token_classifier,
        trajectory=trajectory,
        VOCABULARY=VOCABULARY,
    )
