"""RolloutDataModule: prompts and a reward in, chunks of rewarded responses out, on every rank."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.errors import RolloutError
from lightning_ppo.ranks import Relay
from lightning_ppo.rollout.assembly import RunPlace, build_engine, build_generators, build_ray, chosen_engine
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.data_sets import DataSets, Rows
from lightning_ppo.rollout.deal import Share, deal
from lightning_ppo.rollout.engine import Engine, EngineName
from lightning_ppo.rollout.generators import Generators
from lightning_ppo.rollout.last_run import LastRun
from lightning_ppo.rollout.loaders import ChunkLoader, PromptBatches
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.trainer_process import TrainerProcess
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.devices import gpu_numbers
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.validation import check_kind, reject

if TYPE_CHECKING:
    from lightning_ppo.rollout.ray.runtime import RayRuntime

log = logging.getLogger(__name__)

VALIDATION_BATCH = 1024
"""Prompts sampled together in validation; the engine keeps its slots full by itself."""


class RolloutDataModule(L.LightningDataModule):
    """Delivers rollouts. Rank 0 generates; the other ranks get their equal share of every chunk.

    Args:
        prompts: A jsonl file, a Hugging Face dataset folder, or a sequence of dicts. Each row has a `prompt`: text,
            token ids, or chat messages; other columns go to the reward by name.
        reward: A callable, or its import path (`package.module:function`, `path/to/file.py:function`); async if it is
            slow. It gets by name `prompt`, `response`, `finish_reason` and other columns, and returns a finite number.
        validation_prompts: The same for `validate` and validation during `fit`; None switches it off.
        rollout: How many rollouts, how they are sampled, in which order they are trained.
        engine: What generates: `local`, the built-in engine in a process of its own, or `vllm`.
        local: Settings of the built-in engine.
        vllm: Settings of generation by vLLM servers.
        ray: Where Ray places vLLM servers (`vllm.placement: ray`) and reward workers (`rollout.reward_workers`).
    """

    def __init__(
        self,
        prompts: str | list[dict[str, Any]] | Sequence[Mapping[str, Any]],
        reward: str | Callable[..., Any],
        validation_prompts: str | list[dict[str, Any]] | Sequence[Mapping[str, Any]] | None = None,
        rollout: RolloutConfig = RolloutConfig(),  # noqa: B008 - frozen
        engine: EngineName = "local",
        local: LocalEngineConfig = LocalEngineConfig(),  # noqa: B008 - frozen
        vllm: VLLMConfig = VLLMConfig(),  # noqa: B008 - frozen
        ray: RayConfig = RayConfig(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        check_kind("rollout", rollout, RolloutConfig)
        check_kind("ray", ray, RayConfig)
        self.prompts: Rows = prompts
        self.validation_prompts: Rows | None = validation_prompts
        self.reward = reward
        self.rollout = rollout
        self.engine_config = chosen_engine(engine, local, vllm)
        self.ray_config = ray
        self._seed: int | None = None
        self._data: DataSets | None = None
        self._last = LastRun()
        self._generators: Generators | None = None
        """On rank 0."""
        self._ray: RayRuntime | None = None
        self._engine_is_up = False
        self.served_version = -1
        """Policy version that the engine was last given."""
        self._process: TrainerProcess | None = None
        self._directory: Path | None = None

    # ------------------------------------------------------------------ set-up

    def make_engine(self) -> Engine:
        """Build the engine, not started yet; override to use another one."""
        gpus = gpu_numbers(self._trainer().strategy)
        return build_engine(self.engine_config, self.rollout, self._directory, self._ray, log.info, gpus)

    @property
    def run_seed(self) -> int:
        """Seed of the run; before there is one, of one that began now."""
        return self.rollout.run_seed if self._seed is None else self._seed

    def prepare(self, tokenizer: Any, max_context_tokens: int, vocabulary: int, warmup_steps: int = 0) -> None:
        """Load and check all prompts, and the reward's signature. Nothing is started.

        Args:
            tokenizer: The policy's tokenizer.
            max_context_tokens: The policy's context.
            vocabulary: The policy's vocabulary size.
            warmup_steps: PPO steps that leave the policy as it is.

        Raises:
            DataError: a row cannot be used.
            ConfigError: the reward asks for a column that is not there, the policy lacks a token of the tokenizer or of
                `stop_token_ids`, or rollouts are to be recorded without a run folder.
        """
        self._seed = self._last.seed(self.trainer, self.rollout.run_seed)
        self._data = data = DataSets.load(
            self.prompts,
            self.validation_prompts,
            self.reward,
            self.rollout,
            tokenizer=tokenizer,
            policy_context=max_context_tokens,
            vocabulary=vocabulary,
        )
        # a collective, so it is asked for here and not by rank 0 alone
        self._directory = self._run_directory()
        max_steps = self._trainer().max_epochs if self._trainer().state.fn == TrainerFn.FITTING else None
        if max_steps is not None and self.rollout.record_rollouts and self._directory is None:
            raise reject("record_rollouts", True, "has no folder to write to", "set trainer.logger, or switch it off")
        place = RunPlace(self.run_seed, self._trainer().world_size, warmup_steps, self._directory, max_steps)
        self._relay().run(lambda poll: self._build(data, tokenizer, place))

    def _build(self, data: DataSets, tokenizer: Any, place: RunPlace) -> None:
        """On rank 0: build what generates."""
        self._ray = build_ray(self.engine_config, self.rollout, self.ray_config, gpu_numbers(self._trainer().strategy))
        self._generators = build_generators(
            self.make_engine(),
            data,
            self.rollout,
            place,
            self._ray,
            tokenizer=tokenizer,
            is_reproducible=not isinstance(self.engine_config, VLLMConfig),
        )
        if self._last.goes_on(self.trainer, self._trainer().global_step):
            self._generators.collector.load_state_dict(self._last.position)

    def start_engine(self, config_json: str, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> bool:
        """Start generation's processes with the policy's weights, unless they run already. A collective.

        Returns:
            Whether they were started now.
        """
        if self._engine_is_up:
            return False
        self._process = TrainerProcess.confine(self.engine_config)
        self._relay().run(lambda poll: self._rank_zero().start(config_json, weights, policy_version))
        self._engine_is_up, self.served_version = True, policy_version
        return True

    def start_rollouts(self, ppo_step: int, policy_version: int) -> None:
        """Start generating for training. A collective."""
        self._last.began(self.trainer, self.run_seed)
        self._relay().run(lambda poll: self._rank_zero().start_rollouts(ppo_step, policy_version))

    def close(self) -> None:
        """Stop generation; safe to call twice, on every rank."""
        if self._generators is not None and (position := self._generators.close()):
            self._last.position = position
        self._generators = self._ray = None
        self._engine_is_up = False
        if self._process is not None:
            self._process.release()
            self._process = None

    # ------------------------------------------------------------------ what the PPO step asks for; collectives

    def refit(
        self, weights: Iterable[tuple[str, Tensor]], version: int, prove: Callable[[], object] = lambda: None
    ) -> None:
        """Make the engine serve new weights (none: just the number), have that proved, then let rollouts start."""
        self._relay().run(lambda poll: self._rank_zero().refit(poll, weights, version))
        prove()
        self._relay(stops=False).run(lambda poll: self._rank_zero().publish(version))
        self.served_version = version

    @property
    def refit_tolerance(self) -> float | None:
        """Largest difference of a probe's log-probs that proves a refit; None where none is needed."""
        return self.engine_config.tolerance if isinstance(self.engine_config, VLLMConfig) else None

    def probe(self, policy_version: int) -> Mapping[str, Trajectory]:
        """Have every replica of the engine answer the same prompt; returns the answers by the replicas' names."""
        return self._relay().run(lambda poll: self._rank_zero().probe(poll, policy_version))

    def sleep(self) -> None:
        """Take the engine off the training device (`rollout.colocated`)."""
        self._relay().run(lambda poll: self._rank_zero().sleep(poll))

    def wake(self) -> None:
        """Give the engine the device again; `refit` must follow."""
        self._relay().run(lambda poll: self._rank_zero().wake())

    def release(self, ppo_step: int, chunks: Sequence[tuple[int, ...]]) -> None:
        """Give the places of trained groups back, and write the step into the run's schedule.

        Args:
            ppo_step: The step that trained them.
            chunks: Draws of each of its chunks.
        """
        self._relay(stops=False).run(lambda poll: self._rank_zero().release(ppo_step, chunks))

    def sample(self, prompts: Sequence[Prompt], *, namespace: str, num_samples: int = 1) -> list[Trajectory]:
        """Sample responses outside of training, with the validation sampling settings; prompt by prompt.

        Args:
            prompts: What to answer.
            namespace: Separates seeds from those of training.
            num_samples: Responses per prompt.

        Raises:
            DataError: a prompt is longer than all of the data sets. For other errors see `SampleJobs.sample`.
        """
        return self._relay().run(lambda poll: self._rank_zero().sample(poll, prompts, namespace, num_samples))

    # ------------------------------------------------------------------ Lightning

    @override
    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(lambda: self._trainer().global_step, self._next_share)

    @override
    def val_dataloader(self) -> PromptBatches | list[Prompt]:
        validation = None if self._data is None else self._data.validation
        return [] if validation is None else PromptBatches(validation, VALIDATION_BATCH)

    predict_dataloader = val_dataloader

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # rows stay on the host; micro-batches move when they are trained

    def position(self, ppo_step: int | None = None) -> dict[str, Any]:
        """Return what became of every prompt, and finished rollouts.

        Args:
            ppo_step: The step whose checkpoint it goes into; older parts of the journal are dropped then.

        Not Lightning's `state_dict`, which is stored under the class's name: a renamed subclass would lose its place.
        """
        if self._generators is None:
            return self._last.position
        if ppo_step is not None:
            self._generators.collector.checkpointed(ppo_step)
        return self._generators.collector.state_dict()

    def load_position(self, position: dict[str, Any]) -> None:
        """Continue where a checkpoint was saved. A collective.

        Raises:
            CheckpointError: the position is damaged, or belongs to other prompts, seed or shuffle setting.
        """
        if self._trainer().state.fn == TrainerFn.FITTING:
            self._relay().run(lambda poll: self._rank_zero().collector.load_state_dict(position))
            if self._generators is not None:
                self._last.position = position

    def _next_share(self, ppo_step: int, consumed: int) -> Share:
        trainer = self._trainer()

        def work(poll: Callable[[], None]) -> list[Share]:
            claim = self._rank_zero().next_groups(poll, ppo_step, consumed)
            return deal(claim, trainer.world_size)

        return self._relay().run(work)[trainer.global_rank]

    def _relay(self, *, stops: bool = True) -> Relay:
        """What rank 0 does while the others wait; `stops=False`: a step that is all but complete is completed first."""
        strategy = self._trainer().strategy
        if not isinstance(strategy, StreamingPPOStrategy):
            name = type(strategy).__name__
            raise reject("strategy", name, "cannot deal rollouts out", "set strategy=StreamingPPOStrategy()")
        return strategy.relay if stops else replace(strategy.relay, is_stopped=lambda: False)

    def _rank_zero(self) -> Generators:
        if self._generators is None:
            raise RolloutError("rollouts are not set up; run Trainer.fit, validate or predict")
        return self._generators

    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RolloutError("RolloutDataModule is not attached to a trainer; pass it to Trainer.fit")
        return self.trainer

    def _run_directory(self) -> Path | None:
        """The logger's folder; without a logger nothing is written."""
        trainer = self._trainer()
        return Path(trainer.log_dir) if trainer.loggers and trainer.log_dir is not None else None
