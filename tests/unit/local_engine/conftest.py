"""Tiny policies, and a way to run the engine's inside without its process."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lightning_ppo.rollout.engine import Generation, GenerationRequest, SamplingParams
from lightning_ppo.rollout.local.decoder import NativeDecoder
from lightning_ppo.rollout.local.fallback import BatchScheduler
from lightning_ppo.rollout.local.protocol import Finished, Submit
from lightning_ppo.rollout.local.rows import RowTable
from lightning_ppo.rollout.local.scheduler import SlotScheduler
from lightning_ppo.rollout.local.skeleton import Skeleton

_TINY = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_GQA = _TINY | {"num_key_value_heads": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_TINY),
    "llama_gqa_tied": lambda: LlamaConfig(**_GQA | {"tie_word_embeddings": True}),
    "llama_biases": lambda: LlamaConfig(**_GQA, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama_head_dim": lambda: LlamaConfig(**_TINY, head_dim=16),
    "llama_yarn": lambda: LlamaConfig(**_TINY, rope_parameters=_YARN),
    "llama_llama3": lambda: LlamaConfig(**_TINY, rope_parameters=_LLAMA3),
    "llama_one_layer": lambda: LlamaConfig(**_TINY | {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=None, head_dim=6),
    "qwen2": lambda: Qwen2Config(**_GQA),
    "qwen3": lambda: Qwen3Config(**_GQA, head_dim=8),
    "qwen3_tied": lambda: Qwen3Config(**_GQA | {"tie_word_embeddings": True}, head_dim=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=29,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: v for k, v in _TINY.items() if k != "num_key_value_heads"}, use_parallel_residual=True
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy() -> Callable[..., Any]:
    def make(name: str, seed: int = 0, **changes: Any) -> Any:
        config = _CONFIGS[name]()
        for field, value in changes.items():
            setattr(config, field, value)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1, where a decoder that forgets them would be right.
            parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def build() -> Callable[..., Any]:
    """The engine's inside for a model, with its weights loaded."""

    def make(
        model: Any,
        slots: int = 4,
        context: int = 64,
        backend: str = "native",
        dtype: Any = torch.float32,
        threads: int = 1,
    ) -> Any:
        skeleton = Skeleton.of(model.config.to_json_string(use_diff=False))
        rows = RowTable(slots, context, skeleton.vocab_size)
        cpu = torch.device("cpu")
        if backend == "native":
            assert skeleton.native_problem(context) is None
            decoder = NativeDecoder(skeleton, slots, context, cpu, dtype, threads)
            scheduler: Any = SlotScheduler(decoder, rows)
        else:
            scheduler = BatchScheduler(skeleton, rows, cpu, dtype)
        scheduler.load(skeleton.canonical(model.state_dict()))
        return scheduler

    return make


@pytest.fixture
def request_of() -> Callable[..., GenerationRequest]:
    def make(prompt: Any, seed: int = 0, max_tokens: int = 12, **sampling: Any) -> GenerationRequest:
        return GenerationRequest(f"r{seed}", tuple(prompt), SamplingParams(max_tokens, **sampling), seed)

    return make


def _split(finished: Finished, requests: list[GenerationRequest]) -> dict[int, Generation]:
    found, start = {}, 0
    assert str(finished.logprobs.dtype) == "float32"
    for key, length, stopped in zip(finished.keys, finished.lengths, finished.stopped, strict=True):
        part = slice(start, start + length)
        start += length
        found[key] = Generation(
            requests[key].request_id,
            tuple(finished.token_ids[part].tolist()),
            tuple(finished.logprobs[part].tolist()),
            "stop" if stopped else "length",
            tuple(finished.versions[part].tolist()),
        )
    return found


@pytest.fixture
def drive() -> Callable[..., list[Generation]]:
    """Run requests to their end; `arrivals[i]` is the decode step before which request i is submitted."""

    def run(scheduler: Any, requests: list[GenerationRequest], arrivals: list[int] | None = None) -> list[Generation]:
        arrivals = arrivals or [0] * len(requests)
        found: dict[int, Generation] = {}
        for step in range(10_000):
            for key, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
                if arrival == step:
                    scheduler.submit(Submit(key, request))
            finished = scheduler.step(step)
            if finished is not None:
                found |= _split(finished, requests)
            if len(found) == len(requests):
                return [found[key] for key in range(len(requests))]
        raise AssertionError("the scheduler never finished")

    return run


@pytest.fixture
def reference_logprobs() -> Callable[..., torch.Tensor]:
    """Log-probs of a response under transformers' own full forward: `[T, V]` of all tokens."""

    def compute(model: Any, prompt: Any, response: Any, temperature: float = 1.0) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *response]])
        logits = model(input_ids=ids).logits[0].float()
        return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)

    return compute


@pytest.fixture
def sample_all() -> Callable[..., list[Generation]]:
    """Send requests to a LocalEngine together and wait for all, at most a minute."""

    def run(engine: Any, requests: list[GenerationRequest]) -> list[Generation]:
        async def gather() -> list[Generation]:
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 60)

        return asyncio.run(gather())

    return run
