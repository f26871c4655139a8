"""Small runs that two ranks and one process can both do, and what they record."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_ppo as ppo
from lightning_ppo.rollout.engine import Engine, GenerationRequest
from lightning_ppo.testing import CHARACTERS, FakeEngine

PROMPTS = [{"prompt": f"^{CHARACTERS[6 + i % 30]}{CHARACTERS[6 + i % 7]}="} for i in range(24)]
SGD = partial(torch.optim.SGD, lr=0.05)
WAIT_S = 60.0
"""Deadline of everything in here that waits."""


def draw_of(request_id: str) -> int:
    """`draw12_g0` is of draw 12."""
    return int(request_id.removeprefix("draw").split("_")[0])


@dataclass(frozen=True)
class Setup:
    """A run: its settings, and how its fake engine behaves."""

    steps: int = 3
    ppo: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    sgd: bool = True
    """SGD instead of AdamW, whose first step blows tiny differences of tiny gradients up."""
    plan: tuple[tuple[int, ...], ...] = ()
    """Groups that become ready together, in each PPO step: the chunks to expect."""
    length: Callable[[GenerationRequest], int] | None = None
    delay_s: float = 0.0

    @property
    def sizes(self) -> dict[str, Any]:
        """Settings of the rollouts."""
        base = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_response_tokens": 8, "timeout_s": 30.0}
        return {"min_groups_for_streaming_train": self.rollout.get("num_prompts_per_step", 4), **base, **self.rollout}


def alternating(request: GenerationRequest) -> int:
    """Prompts of even draws get short responses, others hit the limit: sorted by length, rank 1 gets those."""
    return 3 if draw_of(request.request_id) % 2 == 0 else request.sampling.max_tokens


def ragged(request: GenerationRequest) -> int:
    """Some responses are twenty times as long as others."""
    return 2 + request.seed % 3 if request.seed % 4 else 40 - request.seed % 5


EIGHT = {"num_prompts_per_step": 8, "min_groups_for_streaming_train": 2}
CHUNKS = ((8,), (2, 2, 2, 2), (4, 4))
SETUPS = {
    "full": Setup(ppo={"ppo_epochs": 2, "critic_ppo_epochs": 2}, sgd=False),
    "running": Setup(ppo={"normalize_advantages": "running"}, rollout=EIGHT, plan=CHUNKS),
    "batch": Setup(ppo={"normalize_advantages": "batch", "loss_level": "sequence"}, rollout=EIGHT, plan=CHUNKS),
    "regularized": Setup(
        ppo={"kl_placement": "loss", "kl_coef": 0.1, "entropy_coef": 0.1, "max_grad_norm": None},
        rollout=EIGHT,
        plan=((2, 4, 2), (4, 4)),
        steps=2,
    ),
    "one_response": Setup(
        rollout={"num_generations_per_prompt": 1, "min_groups_for_streaming_train": 1}, plan=((2, 2), (4,)), steps=2
    ),
    "ragged": Setup(
        rollout={"max_response_tokens": 40},
        ppo={"micro_batch_tokens": 64, "normalize_advantages": "batch"},
        length=ragged,
    ),
    "minibatches": Setup(
        rollout={"max_response_tokens": 40},
        ppo={"critic_minibatches": 2, "critic_ppo_epochs": 2, "truncated_responses": "mask"},
        length=alternating,
    ),
    "unequal": Setup(
        rollout={"num_prompts_per_step": 2, "num_generations_per_prompt": 1, "max_response_tokens": 40},
        ppo={"normalize_advantages": "off"},
        length=alternating,
    ),
    "masked_share": Setup(
        rollout={"num_prompts_per_step": 2, "num_generations_per_prompt": 1},
        ppo={"truncated_responses": "mask", "critic_ppo_epochs": 2},
        length=alternating,
    ),
    "heartbeat": Setup(steps=1, delay_s=5.0),
    "odd": Setup(rollout={"num_generations_per_prompt": 1, "num_prompts_per_step": 3}),
    "unrepeatable": Setup(rollout={"replay_schedule": "nowhere.jsonl"}),
    "plain": Setup(),
}


class Rollouts(ppo.RolloutDataModule):
    """Rollouts from an engine in this process."""

    def __init__(self, *args: Any, fake: Engine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fake = fake

    def make_engine(self) -> Engine:
        super().make_engine()  # never started; on two ranks it must not take part in a collective alone
        return self.fake


class Release(ppo.PPOCallback):
    """Lets held groups go, the last draws first, so that they make the planned chunks."""

    def __init__(self, plan: tuple[tuple[int, ...], ...], engine: FakeEngine, rewarded: list[str], size: int) -> None:
        self.plan, self.engine, self.rewarded, self.size = plan, engine, rewarded, size

    def on_train_epoch_start(self, trainer, pl_module):
        self._release(trainer, trainer.current_epoch, 0)

    def on_chunk_end(self, trainer, pl_module, payload):
        if not payload.chunk.is_closing:
            self._release(trainer, payload.chunk.ppo_step, payload.chunk.index + 1)

    def _release(self, trainer: L.Trainer, step: int, index: int) -> None:
        if not trainer.is_global_zero:
            return
        groups = self.plan[step][index]
        left = sum(self.plan[step][index:])
        until(lambda: len(self.engine.held) == left * self.size, "held requests")
        before = len(self.rewarded)
        draws = sorted({draw_of(name) for name in self.engine.held}, reverse=True)[:groups]
        for name in self.engine.held:
            if draw_of(name) in draws:
                self.engine.let_go(name)
        until(lambda: len(self.rewarded) == before + groups * self.size, "rewards")
        time.sleep(0.1)  # the event loop commits the group right after its last reward


class Record(ppo.PPOCallback):
    """What a rank saw."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {"policy": [], "critic": [], "chunks": [], "steps": [], "validation": []}

    def on_chunk_ready(self, trainer, pl_module, payload):
        chunk = payload.chunk
        ids = tuple(row.sample_id for row in chunk.rows)
        tokens = sum(len(row.response_ids) for row in chunk.rows)
        self.seen["chunks"].append((chunk.ppo_step, chunk.index, chunk.draws, ids, tokens))

    def on_before_policy_step(self, trainer, pl_module, payload):
        self.seen["policy"].append(flat_grad(pl_module.policy))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if optimizer is pl_module.optimizer("critic"):
            self.seen["critic"].append(flat_grad(pl_module.critic))

    def on_ppo_step_end(self, trainer, pl_module, payload):
        batch = payload.batch
        counts = (payload.ppo_step, trainer.global_step, batch.num_chunks, batch.num_tokens, batch.num_sequences)
        self.seen["steps"].append((counts, payload.metrics))

    def on_validation_epoch_end(self, trainer, pl_module):
        self.seen["validation"].append(float(trainer.callback_metrics["val/reward_mean"]))


class SaveMidStep(ppo.PPOCallback):
    """Asks for a checkpoint after the first chunk of a step, on every rank."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step, self.writes = path, step, []

    def setup(self, trainer, pl_module, stage):
        write = trainer.strategy.checkpoint_io.save_checkpoint

        def counted(checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.writes.append((str(path), trainer.global_step))
            write(checkpoint, path, storage_options)

        trainer.strategy.checkpoint_io.save_checkpoint = counted

    def on_chunk_end(self, trainer, pl_module, payload):
        if payload.chunk.ppo_step == self.step and payload.chunk.index == 0:
            trainer.save_checkpoint(self.path)


def flat_grad(model: torch.nn.Module) -> torch.Tensor:
    """All gradients of a model, one after the other."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def until(is_true: Callable[[], bool], what: str) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


@dataclass
class Run:
    """A run, built."""

    trainer: L.Trainer
    module: ppo.PPOModule
    data: Rollouts
    record: Record

    def fit(self, ckpt_path: Path | None = None) -> dict[str, Any]:
        """Train, and tell what was seen."""
        self.trainer.fit(self.module, self.data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        return self.result()

    def result(self) -> dict[str, Any]:
        """What was seen, and the weights."""
        weights = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        counters = (self.trainer.global_step, self.trainer.current_epoch, self.module.policy_version)
        return {**self.record.seen, "weights": weights, "counters": counters}


def build(
    name: str,
    policy: str,
    folder: Path,
    *,
    devices: int,
    whole: bool = False,
    reward: Callable[..., float] | None = None,
    engine: FakeEngine | None = None,
    callbacks: tuple[L.Callback, ...] = (),
    **trainer: Any,
) -> Run:
    """Build a named run; `whole` makes it full batch, without a plan."""
    setup = SETUPS[name]
    sizes, rewarded = setup.sizes, []
    if whole:
        sizes["min_groups_for_streaming_train"] = sizes["num_prompts_per_step"]
    planned = bool(setup.plan) and not whole

    def score(prompt: str, response: str) -> float:
        rewarded.append(prompt)
        return sum(character.isalpha() for character in response) / 8

    if engine is None:
        holds = (lambda request: request.request_id.startswith("draw")) if planned else (lambda request: False)
        engine = FakeEngine(length=setup.length, delay_s=setup.delay_s, holds=holds)
    record = Record()
    extra = [Release(setup.plan, engine, rewarded, sizes["num_generations_per_prompt"])] if planned else []
    data = Rollouts(
        PROMPTS,
        reward or score,
        PROMPTS[:5],
        rollout=ppo.RolloutConfig(**sizes),
        local=ppo.LocalEngineConfig(trainer_threads=None),
        fake=engine,
    )
    optimizers = {"policy_optimizer": SGD, "critic_optimizer": SGD} if setup.sgd else {}
    module = ppo.PPOModule(policy, ppo=ppo.PPOConfig(**setup.ppo), **optimizers)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"logger": False, "num_sanity_val_steps": 0, "limit_val_batches": 0, "default_root_dir": folder}
    lightning = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ppo.StreamingPPOStrategy(process_group_backend="gloo", timeout=timedelta(seconds=120)),
        max_epochs=setup.steps,
        callbacks=[record, *extra, *callbacks],
        **{**quiet, **defaults, **trainer},
    )
    return Run(lightning, module, data, record)
