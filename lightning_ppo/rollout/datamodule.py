"""RolloutDataModule: prompts and a reward in, chunks of rewarded responses out, on every rank."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.errors import RolloutError
from lightning_ppo.ranks import Relay
from lightning_ppo.rollout.assembly import RunPlace, build_collector, build_engine, build_ray, chosen_engine
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.deal import Share, deal
from lightning_ppo.rollout.engine import Engine, PolicySpec
from lightning_ppo.rollout.generators import Generators
from lightning_ppo.rollout.loaders import ChunkLoader, PromptBatches
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.trainer_process import TrainerProcess
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.validation import reject, require

if TYPE_CHECKING:
    from lightning_ppo.rollout.ray.runtime import RayRuntime

log = logging.getLogger(__name__)

Rows = str | Path | Sequence[Mapping[str, Any]]

VALIDATION_BATCH = 1024
"""Prompts sampled together in validation; the engine keeps its slots full by itself."""


class RolloutDataModule(L.LightningDataModule):
    """Delivers rollouts. Rank 0 generates; the other ranks get their equal share of every chunk.

    Args:
        prompts: A jsonl file, a Hugging Face dataset folder, or a sequence of dicts. Each row has a `prompt`: text,
            token ids, or chat messages; other columns go to the reward by name.
        reward: A callable, sync or async, or its import path (`package.module:function`, `path/to/file.py:function`).
            It gets `prompt` and `response` (text) and the row's other columns by name, and returns a finite number.
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
        engine: Literal["local", "vllm"] = "local",
        local: LocalEngineConfig = LocalEngineConfig(),  # noqa: B008 - frozen
        vllm: VLLMConfig = VLLMConfig(),  # noqa: B008 - frozen
        ray: RayConfig = RayConfig(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        self.prompts: Rows = prompts
        self.validation_prompts: Rows | None = validation_prompts
        self.reward = reward
        self.rollout = rollout
        self.engine_config = chosen_engine(engine, local, vllm)
        self.ray_config = ray
        self.run_seed = rollout.seed if rollout.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._train_set: PromptSet | None = None
        self._validation_set: PromptSet | None = None
        self._position: dict[str, Any] = {}
        """State of the last run's collector, for a save after `fit` and for another `fit` that goes on."""
        self._position_of: L.Trainer | None = None
        """Whose run it was, so that a run that failed in its first step is not taken for a new one."""
        self._generators: Generators | None = None
        """On rank 0."""
        self._ray: RayRuntime | None = None
        self._stop_token_ids: tuple[int, ...] = ()
        self._engine_is_up = False
        self._process: TrainerProcess | None = None
        self._directory: Path | None = None

    # ------------------------------------------------------------------ set-up

    def make_engine(self) -> Engine:
        """Build the engine, not started yet; override to use another one."""
        return build_engine(self.engine_config, self.rollout, self._directory, self._ray, log.info)

    def prepare(self, tokenizer: Any, max_context_tokens: int, vocabulary: int, warmup_steps: int = 0) -> None:
        """Load and check all prompts, and the reward's signature. Nothing is started.

        Args:
            tokenizer: The policy's tokenizer.
            max_context_tokens: The policy's context.
            vocabulary: The policy's vocabulary size.
            warmup_steps: PPO steps that leave the policy as it is.

        Raises:
            DataError: a row cannot be used.
            ConfigError: the reward asks for a column that is not there, or the policy lacks a token of the tokenizer.
        """
        size, why = len(tokenizer), f"is more tokens than the policy's {vocabulary}"
        require(size <= vocabulary, "tokenizer", size, why, "use the policy's own")
        longest = max_context_tokens - self.rollout.max_response_tokens
        self._train_set = PromptSet(self.prompts, tokenizer, longest)
        timeout_s = self.rollout.reward_timeout_s
        reward = RewardFunction(self.reward, self._train_set.columns, timeout_s)
        if self.validation_prompts is not None:
            self._validation_set = PromptSet(self.validation_prompts, tokenizer, longest)
            RewardFunction(self.reward, self._validation_set.columns, timeout_s)
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._stop_token_ids = ends if self.rollout.stop_token_ids is None else self.rollout.stop_token_ids
        # a collective, so it is asked for here and not by rank 0 alone
        self._directory = self._run_directory()
        if not self._trainer().is_global_zero:
            return
        self._ray = build_ray(self.engine_config, self.rollout, self.ray_config)
        engine = self.make_engine()
        max_steps = self._trainer().max_epochs if self._trainer().state.fn == TrainerFn.FITTING else None
        collector, schedule = build_collector(
            engine,
            self._train_set,
            reward,
            self.rollout,
            RunPlace(self.run_seed, self._trainer().world_size, warmup_steps, self._directory, max_steps),
            tokenizer=tokenizer,
            stop_token_ids=self._stop_token_ids,
            is_reproducible=not isinstance(self.engine_config, VLLMConfig),
        )
        self._generators = Generators(engine, collector, reward, self._train_set[0], self.rollout, self._ray, schedule)
        if self._position and (self._trainer().global_step > 0 or self._position_of is self.trainer):
            collector.load_state_dict(self._position)

    def start_engine(self, spec: PolicySpec, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> bool:
        """Start generation's processes with the policy's weights, unless they run already. A collective.

        Returns:
            Whether they were started now.
        """
        if self._engine_is_up:
            return False
        self._process = TrainerProcess.confine(self.engine_config)
        self._relay().run(lambda poll: self._rank_zero().start(spec, weights, policy_version))
        self._engine_is_up = True
        return True

    def start_rollouts(self, ppo_step: int, policy_version: int) -> None:
        """Start generating for training."""
        if self._generators is not None:
            self._generators.start_rollouts(ppo_step, policy_version)

    def close(self) -> None:
        """Stop generation; safe to call twice, on every rank."""
        if self._generators is not None and (position := self._generators.close()):
            self._position, self._position_of = position, self.trainer
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
        if self._generators is not None:
            self._generators.publish(version)

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
        if self._generators is not None:
            self._generators.release(ppo_step, chunks)

    def sample(self, prompts: Sequence[Prompt], *, namespace: str, num_samples: int = 1) -> list[Trajectory]:
        """Sample responses outside of training, with the validation sampling settings.

        Args:
            prompts: What to answer.
            namespace: Separates seeds from those of training.
            num_samples: Responses per prompt.
        """

        def work(poll: Callable[[], None]) -> list[Trajectory]:
            return self._rank_zero().collector.jobs.sample(
                prompts,
                seed_namespace=namespace,
                num_samples=num_samples,
                sampling=self.rollout.validation_sampling(self._stop_token_ids),
                timeout_s=self.rollout.timeout_s,
                poll=poll,
            )

        return self._relay().run(work)

    # ------------------------------------------------------------------ Lightning

    @override
    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(lambda: self._trainer().global_step, self._next_share)

    @override
    def val_dataloader(self) -> PromptBatches | list[Prompt]:
        return [] if self._validation_set is None else PromptBatches(self._validation_set, VALIDATION_BATCH)

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
            return self._position
        if ppo_step is not None:
            self._generators.collector.checkpointed(ppo_step)
        return self._generators.collector.state_dict()

    def load_position(self, position: dict[str, Any]) -> None:
        """Continue where a checkpoint was saved.

        Raises:
            CheckpointError: the position is damaged, or belongs to other prompts, seed or shuffle setting.
        """
        if self._generators is not None and self._trainer().state.fn == TrainerFn.FITTING:
            self._generators.collector.load_state_dict(position)
            self._position = position

    def _next_share(self, ppo_step: int, consumed: int) -> Share:
        trainer = self._trainer()

        def work(poll: Callable[[], None]) -> list[Share]:
            claim = self._rank_zero().next_groups(poll, ppo_step, consumed)
            return deal(claim, trainer.world_size)

        return self._relay().run(work)[trainer.global_rank]

    def _relay(self) -> Relay:
        strategy = self._trainer().strategy
        if not isinstance(strategy, StreamingPPOStrategy):
            name = type(strategy).__name__
            raise reject("strategy", name, "cannot deal rollouts out", "set strategy=StreamingPPOStrategy()")
        return strategy.relay

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
