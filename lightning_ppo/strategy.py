"""StreamingPPOStrategy: two models take turns, gradients survive a step, and a boundary is never torn."""

import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ppo.accumulator import GradientAccumulator
from lightning_ppo.checkpoint import mark_saved
from lightning_ppo.checkpoint_io import WholeCheckpointIO
from lightning_ppo.errors import CheckpointError, ConfigError, UpdateInProgressError
from lightning_ppo.ranks import Ranks, Relay
from lightning_ppo.residency import Residency
from lightning_ppo.sigterm import SigtermNote

log = logging.getLogger(__name__)

MAX_CHUNKS = 10**6
"""Lightning's batch limit per epoch. A step closes long before; a finite limit keeps Lightning from fetching a chunk
ahead, and does not depend on the configuration, so that a resumed run may change its batch size."""

ALWAYS_ACCUMULATE = 10**9
"""More chunks than any step has: Lightning's loggers and monitors then count PPO steps, not chunks."""


class StreamingPPOStrategy(DDPStrategy):
    """Trains a policy and a critic in turns, one PPO step per Lightning epoch, one rollout chunk per batch.

    Models are not wrapped: each rank accumulates sums of gradients, and one all-reduce per optimizer step adds them up.
    With a single process no process group is created.

    Args:
        ddp_arguments: See `lightning.pytorch.strategies.DDPStrategy`, for example `process_group_backend`, `timeout`.
    """

    strategy_name = "streaming_ppo"

    def __init__(self, **ddp_arguments: Any) -> None:
        # a plain `**`, which the command line can follow to the arguments that there are
        ddp_arguments.setdefault("checkpoint_io", WholeCheckpointIO())
        super().__init__(**ddp_arguments)
        self._residency: Residency | None = None
        self._accumulators: list[GradientAccumulator] = []
        self._closers: list[Callable[[], None]] = []
        self._deferred: dict[str, bool] = {}
        self._open_step: int | None = None
        self._sigterm = SigtermNote()
        self.on_busy_checkpoint = "defer"
        """What a save inside a step does: `defer` it to the end of the step, or `error` (see `CheckpointExclusion`)."""

    # ------------------------------------------------------------------ set-up and tear-down

    @override
    def setup_distributed(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        accelerator, model = self.accelerator, self.model
        if accelerator is None or model is None:
            raise ConfigError("strategy=StreamingPPOStrategy has no model; pass it to a Trainer and call fit")
        accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.configure_ddp()
            self.setup_optimizers(trainer)
            # both are validated by Lightning before this point and only read afterwards
            trainer.accumulate_grad_batches = ALWAYS_ACCUMULATE
            trainer.limit_train_batches = MAX_CHUNKS
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Leave models on the host; they take turns on the device (see `residency`)."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Leave the state beside its model on the host; Lightning would put that of both models on the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @override
    def configure_ddp(self) -> None:
        """Start every rank from rank 0's weights, without a wrapper."""
        if self.world_size > 1 and self.lightning_module is not None:
            for tensor in self.lightning_module.state_dict().values():
                # NCCL moves what is on the device only
                local = tensor.to(self.root_device)
                torch.distributed.broadcast(local, src=0)
                if local is not tensor:
                    tensor.copy_(local)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a torch DataLoader for training: its workers would fetch chunks before the policy is refitted."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if isinstance(dataloader, DataLoader) and trainer is not None and trainer.training:
            raise ConfigError(
                f"train_dataloader=DataLoader(num_workers={dataloader.num_workers}) cannot deliver rollout chunks; "
                "leave RolloutDataModule.train_dataloader as it is"
            )
        return dataloader

    def add_closer(self, close: Callable[[], None]) -> None:
        """Have something closed on every way out of a run: success, exception, interrupt, SIGTERM."""
        self._closers.append(close)

    @override
    def on_train_start(self) -> None:
        self._take_over_sigterm()
        mark_saved(self._trainer())

    def _take_over_sigterm(self) -> None:
        if self.world_size > 1:
            self._sigterm.take_over(self.launcher)

    on_validation_start = on_predict_start = _take_over_sigterm

    @override
    def on_exception(self, exception: BaseException) -> None:
        # a failure while waiting for a chunk does not pass the module
        self.abort_step()
        if isinstance(self.launcher, _SubprocessScriptLauncher):
            # Lightning's observer would kill this process in the middle of its clean-up, once another rank is gone
            observed, self.launcher.procs = self.launcher.procs, list(self.launcher.procs)
            observed.clear()
        self._run_closers()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._run_closers()
        # the run may have failed inside a step
        self._open_step = None
        self._deferred.clear()
        if self._residency is not None:
            self._residency.release()
            self._residency = None
        for accumulator in self._accumulators:
            # the module, which outlives the run, still refers to them
            accumulator.abort()
            accumulator.release()
        self._accumulators.clear()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self.lightning_module.trainer.accumulate_grad_batches = 1
            self.lightning_module.trainer.limit_train_batches = 1.0
        super().teardown()

    def _run_closers(self) -> None:
        while self._closers:
            self._closers.pop()()

    # ------------------------------------------------------------------ what the updates need

    @property
    def residency(self) -> Residency:
        """Who is on the training device."""
        if self._residency is None:
            self._residency = Residency(self.root_device)
        return self._residency

    @property
    def ranks(self) -> Ranks:
        """Sums over the data-parallel ranks."""
        if self.world_size == 1:
            return Ranks.single()
        return Ranks(rank=self.global_rank, world_size=self.world_size, sum_=self._sum)

    @property
    def relay(self) -> Relay:
        """What rank 0 does while the others wait; SIGTERM to any rank ends the wait of all, with exit code 143."""
        return Relay(
            self.ranks,
            self.broadcast,
            is_stopped=lambda: self._sigterm.is_received or self._trainer().received_sigterm,
            stop=lambda: SIGTERMException(128 + signal.SIGTERM),
        )

    def vacate_device(self) -> None:
        """Give all memory of the training device back, for an engine that runs there too. Between updates only."""
        self.residency.release()
        for accumulator in self._accumulators:
            accumulator.release()
        if self.root_device.type == "cuda":
            # freed memory stays with this process otherwise
            torch.cuda.empty_cache()

    def accumulator(self, parameters: Iterable[nn.Parameter]) -> GradientAccumulator:
        """Make gradient buffers for a model."""
        accumulator = GradientAccumulator(parameters, self.ranks.sum_)
        self._accumulators.append(accumulator)
        return accumulator

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Make one optimizer step that Lightning's step counter does not see.

        The precision plugin and `on_before_optimizer_step` run as usual. Lightning would count every optimizer's step
        (Lightning issue 17958); a PPO step is counted once, by `complete_step`.
        """
        self.optimizer_step(optimizer, lambda: None)

    def _sum(self, tensor: Tensor) -> None:
        # NCCL sums on the device only; what a model does not own lives on the host
        local = tensor.to(self.root_device)
        torch.distributed.all_reduce(local)
        if local is not tensor:
            tensor.copy_(local)

    # ------------------------------------------------------------------ the step and the checkpoint window

    @property
    def open_step(self) -> int | None:
        """The PPO step whose chunks are being trained, or None at a boundary."""
        return self._open_step

    def begin_step(self, ppo_step: int) -> None:
        """Close the checkpoint window: from now on there is something that a checkpoint could tear."""
        if self._open_step is not None:
            raise UpdateInProgressError(f"PPO step {self._open_step} is still open; complete or abort it first")
        self._open_step = ppo_step

    def complete_step(self) -> None:
        """Count one PPO step and open the checkpoint window; saves asked for meanwhile are written by `flush_saves`."""
        trainer = self._trainer()
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        self._open_step = None

    def abort_step(self) -> None:
        """Drop the open step, its gradients, and saves asked for since it began."""
        for accumulator in self._accumulators:
            accumulator.abort()
        if self._open_step is None:
            return
        if self._deferred:
            log.warning(
                "PPO step %d failed: %d checkpoint(s) asked for meanwhile are dropped; resume from the last on disk",
                self._open_step,
                len(self._deferred),
            )
            self._deferred.clear()

    def flush_saves(self) -> None:
        """Write the saves that were deferred. A collective: every rank must call it."""
        if self._open_step is not None:
            return
        while self._deferred:
            path, weights_only = next(iter(self._deferred.items()))
            del self._deferred[path]
            self._trainer().save_checkpoint(path, weights_only=weights_only)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._open_step is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # raising while the trainer handles an exception would hide it and skip the tear-down
        interrupted = self._trainer().interrupted
        if self.on_busy_checkpoint == "error" and not interrupted:
            raise CheckpointError(
                f"ckpt={filepath} was asked for inside PPO step {self._open_step}; save between steps"
            )
        if not interrupted:
            self._deferred[str(filepath)] = "optimizer_states" not in checkpoint

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._deferred.pop(str(filepath), None) is None:
            super().remove_checkpoint(filepath)

    def _trainer(self) -> L.Trainer:
        if self.lightning_module is None:
            raise ConfigError("strategy=StreamingPPOStrategy has no model; pass it to a Trainer and call fit")
        return self.lightning_module.trainer


StrategyRegistry.register(
    StreamingPPOStrategy.strategy_name,
    StreamingPPOStrategy,
    description="Streaming PPO: policy and critic take turns, one PPO step per epoch, one rollout chunk per batch",
    override=True,
)
