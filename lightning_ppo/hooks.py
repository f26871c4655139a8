"""Hooks of a PPO step for researchers' callbacks, and the dispatcher that calls them.

Lightning's own dispatcher cannot call hooks that only some callbacks have, and forbids `self.log` inside them; this one
skips callbacks without the method (as `Fabric.call` does) and leaves the current function as it is.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lightning_ppo.batch import Chunk, StepBatch, TrainRow
from lightning_ppo.errors import ConfigError
from lightning_ppo.updates.critic_update import CriticStats
from lightning_ppo.updates.policy_update import PolicyStats


@dataclass(frozen=True)
class ChunkReady:
    """A chunk arrived; nothing was computed on it yet."""

    chunk: Chunk


@dataclass(frozen=True)
class ChunkEnd:
    """A chunk's gradients are accumulated."""

    chunk: Chunk
    rows: tuple[TrainRow, ...]
    """Rows of the chunk on this rank, with values, advantages and returns."""


@dataclass(frozen=True)
class RolloutBatchComplete:
    """All rows of the step are there; no model was updated yet."""

    batch: StepBatch


@dataclass(frozen=True)
class BeforePolicyStep:
    """The optimizer is about to step; the parameters' `.grad` hold the final, clipped gradient."""

    optimizer: Optimizer


@dataclass(frozen=True)
class PolicyUpdateEnd:
    """The policy was updated."""

    ppo_step: int
    """The open PPO step, from 0."""
    stats: tuple[PolicyStats, ...]
    """One entry per optimizer step that was made, over all epochs; numbers are those of all ranks."""


@dataclass(frozen=True)
class BeforeRefit:
    """The generators are about to get new weights, or just a new version number in critic warm-up."""

    policy_version: int
    """The version that they will serve."""
    weights_changed: bool
    """False in critic warm-up."""


@dataclass(frozen=True)
class RefitEnd:
    """The generators serve this version."""

    policy_version: int
    seconds: float


@dataclass(frozen=True)
class CriticEpochEnd:
    """One pass of the critic is done."""

    epoch: int
    """From 0."""
    stats: tuple[CriticStats, ...]
    """One entry per optimizer step; numbers are those of all ranks."""


@dataclass(frozen=True)
class PPOStepEnd:
    """The step is complete and counted."""

    ppo_step: int
    """Completed PPO steps."""
    batch: StepBatch
    """The rows of this rank."""
    metrics: dict[str, float]
    """What is logged for the step, by name; the same on every rank except for times."""


class PPOCallback(Callback):
    """A callback with the hooks of a PPO step, in the order in which they are called. All do nothing by default.

    Every hook is called on every rank. In a colocated run those of the refit come after those of the critic.
    """

    def on_chunk_ready(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: ChunkReady) -> None:
        """Called when a chunk arrived."""

    def on_chunk_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: ChunkEnd) -> None:
        """Called when a chunk's gradients are accumulated."""

    def on_rollout_batch_complete(
        self, trainer: L.Trainer, pl_module: L.LightningModule, payload: RolloutBatchComplete
    ) -> None:
        """Called when all chunks of the step are accumulated."""

    def on_before_policy_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, payload: BeforePolicyStep
    ) -> None:
        """Called right before each policy optimizer step; never in critic warm-up."""

    def on_policy_update_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: PolicyUpdateEnd) -> None:
        """Called when the policy is updated; not in critic warm-up."""

    def on_before_refit(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: BeforeRefit) -> None:
        """Called before the generators get new weights."""

    def on_refit_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: RefitEnd) -> None:
        """Called when the generators serve the new weights."""

    def on_critic_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: CriticEpochEnd) -> None:
        """Called after each pass of the critic, by `CriticEpochs.train`."""

    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: PPOStepEnd) -> None:
        """Called when the step is complete and counted; `global_step` has moved."""


_HOOK_OF = {
    ChunkReady: "on_chunk_ready",
    ChunkEnd: "on_chunk_end",
    RolloutBatchComplete: "on_rollout_batch_complete",
    BeforePolicyStep: "on_before_policy_step",
    PolicyUpdateEnd: "on_policy_update_end",
    BeforeRefit: "on_before_refit",
    RefitEnd: "on_refit_end",
    CriticEpochEnd: "on_critic_epoch_end",
    PPOStepEnd: "on_ppo_step_end",
}


def call_hooks(trainer: L.Trainer, payload: Any) -> None:
    """Call the payload's hook on every callback that has it, and then on the module."""
    name = _HOOK_OF[type(payload)]
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook = getattr(callback, name, None)
        if hook is not None:
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):  # type: ignore[attr-defined]
                hook(trainer, module, payload)
    hook = getattr(module, name, None)
    if hook is not None:
        hook(payload)


def check_hook_names(callbacks: Iterable[Callback]) -> None:
    """Find misspelt hooks, which would otherwise never be called.

    Raises:
        ConfigError: a `PPOCallback` has a public method starting with `on_` that is neither Lightning's nor ours.
    """
    known = {name for name in dir(PPOCallback) if name.startswith("on_")}
    for callback in callbacks:
        if not isinstance(callback, PPOCallback):
            continue
        for name in dir(type(callback)):
            if name.startswith("on_") and name not in known and callable(getattr(type(callback), name)):
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {close[0]}?" if close else "see PPOCallback for the hooks"
                raise ConfigError(f"callbacks={type(callback).__name__}.{name} is not a hook; {hint}")
