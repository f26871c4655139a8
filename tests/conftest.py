"""A tiny policy, and short runs of the whole loop with an engine in this process."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_ppo as ppo
from lightning_ppo.rollout.engine import Engine
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.testing import CHARACTERS, FakeEngine, char_tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests `pytest -n 2` must run in one process, one after the other; the longest part begins first.

    Those of a file share its fixtures. Those of vLLM share a server; those of Ray must not find another local Ray.
    """
    if not getattr(config.option, "loadgroup", False):
        return
    servers = Path(__file__).parent / "ray", Path(__file__).parent / "vllm"
    items.sort(key=lambda item: item.path.parent not in servers)
    for item in items:
        name = "servers" if item.path.parent in servers else str(item.path.relative_to(config.rootpath))
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on two busy cores are slower than one; and global state must not leak between tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    yield
    torch.set_num_threads(threads)
    os.environ.pop("PL_GLOBAL_SEED", None)
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = seed


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Llama of 17 k parameters over the characters of `char_tokenizer`."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


class FakeRollouts(ppo.RolloutDataModule):
    """Rollouts from an engine in this process."""

    def __init__(self, *args: Any, fake: Engine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fake = fake

    def make_engine(self) -> Engine:
        return self.fake


def count_letters(prompt: str, response: str) -> float:
    """A reward that varies with the response."""
    return sum(character.isalpha() for character in response) / 8


@dataclass
class Run:
    """A finished (or failed) run."""

    trainer: L.Trainer
    module: ppo.PPOModule
    data: FakeRollouts
    fake: FakeEngine
    fit: Callable[..., None] = field(repr=False)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters of both models."""
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


PROMPTS = [{"prompt": f"^{CHARACTERS[6 + i % 30]}{CHARACTERS[6 + i % 7]}="} for i in range(24)]


@pytest.fixture
def make_run(policy_folder: str, tmp_path: Path) -> Callable[..., Run]:
    """Build runs: `make_run(steps=3, ppo={...}, rollout={...}, callbacks=[...], **trainer_settings)`, then `.fit()`."""

    def build(
        steps: int = 3,
        *,
        ppo_settings: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        module: dict[str, Any] | None = None,
        fake: FakeEngine | None = None,
        prompts: Any = None,
        reward: Any = count_letters,
        validation_prompts: Any = None,
        strategy: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> Run:
        engine = fake if fake is not None else FakeEngine()
        sizes: dict[str, Any] = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "min_groups_for_streaming_train": 4,
            "max_response_tokens": 8,
            "timeout_s": 20.0,
        }
        data = FakeRollouts(
            PROMPTS if prompts is None else prompts,
            reward,
            validation_prompts,
            rollout=ppo.RolloutConfig(**{**sizes, **(rollout or {})}),
            local=ppo.LocalEngineConfig(trainer_threads=None),
            fake=engine,
        )
        model = ppo.PPOModule(policy_folder, ppo=ppo.PPOConfig(**(ppo_settings or {})), **(module or {}))
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
        }
        lightning = L.Trainer(
            strategy=ppo.StreamingPPOStrategy(**(strategy or {})), max_epochs=steps, **{**defaults, **trainer}
        )

        def fit(ckpt_path: str | Path | None = None) -> None:
            lightning.fit(model, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)

        return Run(lightning, model, data, engine, fit)

    return build


@pytest.fixture
def cut(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Rollout settings for runs whose chunks do not depend on timing: `cut(2, 1, 1)`; `cut(4)` is full-batch mode."""

    def build(*sizes: int, steps: int = 4) -> dict[str, Any]:
        path = tmp_path / f"chunks_{'_'.join(map(str, sizes))}.jsonl"
        first = 0
        for step in range(steps):
            chunks = []
            for size in sizes:
                chunks.append(range(first, first + size))
                first += size
            ChunkSchedule.append(path, step, chunks)
        return {"min_groups_for_streaming_train": min(sizes), "replay_chunks": str(path)}

    return build
