"""Tiny models, random ragged rows, and a rig that drives a split update and records the gradient it ends with."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from lightning_ppo.accumulator import GradientAccumulator
from lightning_ppo.algorithms import RunningCentre
from lightning_ppo.batch import TrainRow, Trajectory
from lightning_ppo.config import PPOConfig
from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.policy import PolicyModel
from lightning_ppo.ranks import Ranks
from lightning_ppo.residency import Residency
from lightning_ppo.updates.critic_update import CriticStats, CriticUpdate
from lightning_ppo.updates.normalization import AdvantageNormalizer
from lightning_ppo.updates.policy_update import PolicyStats, PolicyUpdate

VOCABULARY = 11
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(**settings | changes)


def gpt2_config(**changes: Any) -> GPT2Config:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return GPT2Config(**settings | changes)


def tiny_policy(dtype: torch.dtype = torch.float64, temperature: float = 1.0, **changes: Any) -> PolicyModel:
    """Llama, or GPT-2 in float64: Llama's norms compute in float32 whatever the parameters are."""
    torch.manual_seed(0)
    if dtype == torch.float64:
        return PolicyModel(GPT2LMHeadModel(gpt2_config(**changes)).to(dtype), temperature)
    return PolicyModel(LlamaForCausalLM(llama_config(**changes)).to(dtype), temperature)


def tiny_critic(dtype: torch.dtype = torch.float64, **changes: Any) -> CriticModel:
    """The same backbones with a random value head."""
    torch.manual_seed(1)
    if dtype == torch.float64:
        return CriticModel(GPT2ForTokenClassification(gpt2_config(num_labels=1, **changes)).to(dtype))
    return CriticModel(LlamaForTokenClassification(llama_config(num_labels=1, **changes)).to(dtype))


def random_trajectory(generator: torch.Generator, name: str, dtype: torch.dtype = torch.float64) -> Trajectory:
    """A prompt of 1-4 tokens and a response of 1-7 tokens of which some may come from an environment."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    length = number(1, 8)
    mask = torch.rand(length, generator=generator) < 0.75
    mask[number(0, length)] = True
    rollout = -3 * torch.rand(length, generator=generator, dtype=torch.float64)
    return Trajectory(
        sample_id=name,
        prompt_ids=torch.randint(2, VOCABULARY, (number(1, 5),), generator=generator),
        response_ids=torch.randint(1, VOCABULARY, (length,), generator=generator),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, rollout, 0.0).to(dtype),
        policy_versions=torch.zeros(length, dtype=torch.int64),
        reward=float(torch.rand((), generator=generator)),
        finish_reason="stop",
        response_text="",
    )


def random_rows(
    count: int, seed: int = 0, dtype: torch.dtype = torch.float64, masked: Sequence[int] = (), offset: float = 0.7
) -> tuple[TrainRow, ...]:
    """Ragged rows with holes in the mask; those in `masked` have no trained token."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        trajectory = random_trajectory(generator, f"s{index}", dtype)
        mask = trajectory.response_mask if index not in masked else torch.zeros_like(trajectory.response_mask)

        def noise(scale: float, shift: float, mask: Tensor = mask) -> Tensor:
            drawn = torch.randn(len(mask), generator=generator, dtype=torch.float64) * scale + shift
            return torch.where(mask, drawn, 0.0).to(dtype)

        rows.append(
            TrainRow(
                trajectory=trajectory,
                mask=mask,
                values=noise(0.5, 0.0),
                advantages=noise(1.3, offset),
                returns=noise(0.5, 0.3),
                old_logprobs=noise(0.3, -2.4),
                ref_logprobs=noise(0.5, -2.4),
            )
        )
    return tuple(rows)


@dataclass
class Rig:
    """An update of one model whose optimizer only records the gradient it was given."""

    model: nn.Module
    config: PPOConfig
    ranks: Ranks = field(default_factory=Ranks.single)
    centre: float = 0.0
    between_chunks: Callable[[], None] = lambda: None
    gradients: list[Tensor] = field(default_factory=list)
    backward_passes: int = 0

    def __post_init__(self) -> None:
        self.accumulator = GradientAccumulator(self.model.parameters(), self.ranks.sum_)
        kind: Any = PolicyUpdate if isinstance(self.model, PolicyModel) else CriticUpdate
        self.update = kind(
            self.model, self.accumulator, self.config, self.ranks, Residency(CPU), self._backward, self._record
        )
        self.normalizer = AdvantageNormalizer(self.config.normalize_advantages, 0.5, self.ranks)
        # a decay of 0.5 after one step: the centre is twice the biased mean
        self.normalizer.running = RunningCentre(0.5, self.centre / 2, 1)

    def _backward(self, loss: Tensor, **options: Any) -> None:
        self.backward_passes += 1
        loss.backward(**options)

    def _record(self) -> None:
        grads = [p.grad for p in dict.fromkeys(self.model.parameters()) if p.requires_grad]
        self.gradients.append(torch.cat([g.detach().reshape(-1).clone() for g in grads if g is not None]))

    def step(self, chunks: Sequence[Sequence[TrainRow]]) -> PolicyStats | CriticStats:
        """One optimizer step over chunks, as the PPO step makes it."""
        self.update.begin()
        self.normalizer.begin()
        plan = None
        for index, rows in enumerate(chunks):
            where = f"PPO step 3 chunk {index}"
            if isinstance(self.update, PolicyUpdate):
                plan = self.normalizer.plan(rows, is_only_chunk=len(chunks) == 1)
                self.update.train_chunk(rows, plan, where)
            else:
                self.update.train_chunk(rows, where)
            self.between_chunks()
        if isinstance(self.update, PolicyUpdate):
            return self.update.finish(self.normalizer.coefficients(plan))
        return self.update.finish()

    def gradient(self, chunks: Sequence[Sequence[TrainRow]]) -> Tensor:
        """The flat gradient that the optimizer gets for these chunks."""
        self.step(chunks)
        return self.gradients[-1]


def config(**changes: Any) -> PPOConfig:
    """Micro-batches of a few rows, no clipping of the gradient."""
    return PPOConfig(**{"micro_batch_tokens": 20, "max_grad_norm": None, "max_critic_grad_norm": None} | changes)


def partitions(items: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Every set partition, blocks in order of their first item."""
    if not items:
        yield []
        return
    head, rest = items[0], list(items[1:])
    for smaller in partitions(rest):
        yield [[head], *smaller]
        for index, block in enumerate(smaller):
            yield [[head, *block], *smaller[:index], *smaller[index + 1 :]]


def ordered_partitions(items: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Every set partition in every order of its blocks."""
    for partition in partitions(items):
        yield from map(list, itertools.permutations(partition))


def relative_error(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact.double()).norm() / exact.double().norm())


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run `work` on emulated ranks: threads whose sums meet at a barrier."""
    barrier = threading.Barrier(size, timeout=60)
    parts: list[Tensor | None] = [None] * size

    def ranks(rank: int) -> Ranks:
        def sum_(tensor: Tensor) -> None:
            parts[rank] = tensor.detach().clone()
            barrier.wait()
            total = sum(part for part in parts if part is not None)
            barrier.wait()
            tensor.copy_(total)

        return Ranks(rank, size, sum_)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ranks(rank)) for rank in range(size)]
        return [future.result(timeout=120) for future in futures]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """Everything above."""
    return SimpleNamespace(
        Rig=Rig,
        config=config,
        on_ranks=on_ranks,
        ordered_partitions=ordered_partitions,
        partitions=partitions,
        random_rows=random_rows,
        random_trajectory=random_trajectory,
        relative_error=relative_error,
        tiny_critic=tiny_critic,
        tiny_policy=tiny_policy,
        VOCABULARY=VOCABULARY,
    )
