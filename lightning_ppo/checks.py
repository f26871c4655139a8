"""Checks across the trainer, the module and the data module, made before any process starts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_ppo.callbacks.step_checkpoint import StepCheckpoint
from lightning_ppo.config import PPOConfig
from lightning_ppo.errors import ConfigError
from lightning_ppo.hooks import check_hook_names
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.datamodule import RolloutDataModule
from lightning_ppo.rollout.failures import check_drops
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.tail import check_alignment, group_alignment
from lightning_ppo.strategy import MAX_CHUNKS, StreamingPPOStrategy
from lightning_ppo.validation import reject

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule

PRECISIONS = ("32-true", "bf16-mixed")


def check_run(trainer: L.Trainer, module: "PPOModule") -> None:
    """Check that trainer, module and data module fit together.

    Raises:
        ConfigError: they do not; one line says what to set instead.
    """
    if not isinstance(trainer.strategy, StreamingPPOStrategy):
        name = type(trainer.strategy).__name__
        raise reject("strategy", name, "cannot run PPO steps", "set strategy=StreamingPPOStrategy()")
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(datamodule, RolloutDataModule):
        raise reject("datamodule", type(datamodule).__name__, "delivers no rollouts", "pass a RolloutDataModule to fit")
    _check_trainer(trainer)
    _check_loaders(trainer, datamodule)
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    check_hook_names(callbacks)
    rollout, ranks = datamodule.rollout, trainer.world_size
    check_algorithm(module.ppo, rollout)
    align = group_alignment(generations=rollout.num_generations_per_prompt, dp_sizes=(ranks,))
    check_alignment(rollout.num_prompts_per_step, align)
    check_drops(
        rollout.failures,
        samplers_stamp=make_sampler(rollout, module.ppo.critic_warmup_steps).capabilities.stamps_targets,
        align=align,
        groups_per_step=rollout.num_prompts_per_step,
        generations=rollout.num_generations_per_prompt,
        row_multiple=ranks,
    )
    _check_minibatches(module.ppo, rollout, ranks)


def _check_trainer(trainer: L.Trainer) -> None:
    fast = trainer.fast_dev_run  # type: ignore[attr-defined]
    if fast:
        raise reject("trainer.fast_dev_run", fast, "would cut a PPO step short", "set max_epochs=1 instead")
    if trainer.max_steps != -1:
        raise reject("trainer.max_steps", trainer.max_steps, "is not supported", "limit PPO steps with max_epochs")
    if trainer.accumulate_grad_batches != 1:
        raise reject(
            "trainer.accumulate_grad_batches",
            trainer.accumulate_grad_batches,
            "is not supported: a PPO step accumulates all of its chunks",
            "leave it at 1 and set num_prompts_per_step",
        )
    if trainer.gradient_clip_val is not None:
        raise reject(
            "trainer.gradient_clip_val",
            trainer.gradient_clip_val,
            "is not supported: each model has its own",
            "set ppo.max_grad_norm and ppo.max_critic_grad_norm",
        )
    if trainer.gradient_clip_algorithm is not None:
        raise reject(
            "trainer.gradient_clip_algorithm",
            trainer.gradient_clip_algorithm.value,
            "is not supported: gradients are clipped by their norm",
            "set ppo.max_grad_norm and ppo.max_critic_grad_norm",
        )
    precision = trainer.precision
    if precision not in PRECISIONS:
        why = "changes its loss scale between chunks" if "16-mixed" in precision else "is not supported"
        if precision == "bf16-true":
            why = "rounds small updates away"
        raise reject("trainer.precision", precision, why, f"set one of {', '.join(PRECISIONS)}")
    for name, neutral in (("overfit_batches", (0.0,)), ("limit_train_batches", (1.0, MAX_CHUNKS))):
        value = getattr(trainer, name)
        # for Lightning 1 is one batch, and 1.0 all of them
        if value not in neutral or (value == 1 and isinstance(value, int)):
            raise reject(f"trainer.{name}", value, "would cut a PPO step short", "leave it and set max_epochs")
    interval = trainer.val_check_interval
    if interval != 1.0 or isinstance(interval, int):
        raise reject(
            "trainer.val_check_interval", interval, "counts chunks, not PPO steps", "set check_val_every_n_epoch"
        )
    if trainer.check_val_every_n_epoch is None:
        raise reject(
            "trainer.check_val_every_n_epoch", None, "counts chunks, not PPO steps", "set a number of PPO steps"
        )
    reload = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if reload:
        raise reject("trainer.reload_dataloaders_every_n_epochs", reload, "would drop rollouts", "leave it at 0")
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        _check_saver(callback)


def _check_saver(callback: Callback) -> None:
    if isinstance(callback, OnExceptionCheckpoint):
        why = "would save in the middle of a PPO step and resume from there"
        raise reject("trainer.callbacks", "OnExceptionCheckpoint", why, "use ModelCheckpoint(every_n_train_steps=1)")
    if not isinstance(callback, ModelCheckpoint) or isinstance(callback, StepCheckpoint):
        return
    if callback._every_n_train_steps > 0 and (callback.monitor or "").startswith("val/"):
        name = type(callback).__name__
        why = f"with monitor={callback.monitor} and every_n_train_steps ranks a step by the validation before it"
        raise reject("trainer.callbacks", name, why, "use lightning_ppo.StepCheckpoint, or every_n_epochs")


def _check_loaders(trainer: L.Trainer, datamodule: RolloutDataModule) -> None:
    stage = trainer.state.fn
    if stage in (TrainerFn.VALIDATING, TrainerFn.PREDICTING) and datamodule.validation_prompts is None:
        raise reject("validation_prompts", None, f"leaves nothing to {stage.value}", "give a file of prompts")
    # only an override can be a torch loader; Lightning asks for it when the engine runs already
    if stage == TrainerFn.FITTING and type(datamodule).train_dataloader is not RolloutDataModule.train_dataloader:
        loader = datamodule.train_dataloader()
        if isinstance(loader, DataLoader):
            raise reject(
                "train_dataloader",
                f"DataLoader(num_workers={loader.num_workers})",
                "fetches ahead of the refit",
                "leave RolloutDataModule.train_dataloader as it is",
            )


def check_algorithm(ppo: PPOConfig, rollout: RolloutConfig) -> None:
    """Check that losses and rollouts fit together.

    Raises:
        ConfigError: they do not.
    """
    streaming = rollout.is_streaming
    full_batch = f"set min_groups_for_streaming_train={rollout.num_prompts_per_step} for full-batch mode"
    for name in ("ppo_epochs", "policy_minibatches"):
        value = getattr(ppo, name)
        if streaming and value > 1:
            raise reject(name, value, "needs the whole step at once, but this run streams", full_batch)
    is_on_policy = make_sampler(rollout, ppo.critic_warmup_steps).is_on_policy
    if not is_on_policy and ppo.importance_correction == "none" and ppo.old_logprobs == "recompute":
        field: str = "sampler"
        for name in ("max_lookahead_versions", "warmup_generation_lead_steps"):
            if getattr(rollout, name):
                field = name
        why = "trains on responses of older policies"
        raise reject(field, getattr(rollout, field), why, "set importance_correction=truncated, or another one")
    if streaming and not ppo.ratio_is_one and ppo.normalize_advantages in ("running", "batch"):
        raise reject(
            "normalize_advantages",
            ppo.normalize_advantages,
            f"needs ratios of 1 in a streamed step, but old_logprobs={ppo.old_logprobs}",
            f"set normalize_advantages=chunk or off, or {full_batch}",
        )


def _check_minibatches(ppo: PPOConfig, rollout: RolloutConfig, ranks: int) -> None:
    groups, left = rollout.num_prompts_per_step, ""
    if rollout.failures.drop == "skip":
        least = rollout.failures.least_groups(groups)
        # drops because of infrastructure have no other bound per step
        is_bounded = rollout.failures.max_consecutive_dropped_prompts == 0
        groups = max(least, groups - rollout.failures.max_dropped_prompts) if is_bounded else least
        left = " that failures.drop=skip may leave"
    rows = groups * rollout.num_generations_per_prompt // ranks
    for name in ("policy_minibatches", "critic_minibatches"):
        value = getattr(ppo, name)
        if value > rows:
            raise reject(name, value, f"is more than the {rows} rows per rank{left}", f"set at most {rows}")


def check_context(max_positions: int | None, rollout: RolloutConfig) -> None:
    """Check that a prompt of at least one token fits beside the longest response.

    Raises:
        ConfigError: it does not.
    """
    if max_positions is not None and rollout.max_response_tokens >= max_positions:
        raise ConfigError(
            f"max_response_tokens={rollout.max_response_tokens} leaves no room for a prompt in the policy's context of "
            f"{max_positions} tokens; set less than {max_positions}"
        )
