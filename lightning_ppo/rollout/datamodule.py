"""RolloutDataModule: prompts and a reward in, chunks of rewarded responses out, on every rank."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_ppo.batch import Chunk, Prompt, Trajectory
from lightning_ppo.errors import RolloutError
from lightning_ppo.ranks import Relay
from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.deal import Share, deal
from lightning_ppo.rollout.engine import Engine, PolicySpec
from lightning_ppo.rollout.loaders import ChunkLoader, PromptBatches
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.tail import group_alignment
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.validation import check_choice, reject, require

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
    ) -> None:
        super().__init__()
        self.prompts: Rows = prompts
        self.validation_prompts: Rows | None = validation_prompts
        self.reward = reward
        self.rollout = rollout
        check_choice("engine", engine, ("local", "vllm"))
        unused, default = (
            ("vllm", vllm != VLLMConfig()) if engine == "local" else ("local", local != LocalEngineConfig())
        )
        if default:
            raise reject(unused, "(set)", f"is not read by engine={engine}", f"set engine={unused}, or drop it")
        self.engine = engine
        self.engine_config: LocalEngineConfig | VLLMConfig = local if engine == "local" else vllm
        self.run_seed = rollout.seed if rollout.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._train_set: PromptSet | None = None
        self._validation_set: PromptSet | None = None
        self._position: dict[str, Any] = {}
        """State of the last run's collector, for a save after `fit` and for another `fit` that goes on."""
        self._engine: Engine | None = None
        self._collector: Collector | None = None
        self._tokenizer: Any = None
        self._stop_token_ids: tuple[int, ...] = ()
        self._engine_is_up = self._has_rollouts = False
        self._threads: int | None = None
        self._directory: Path | None = None

    # ------------------------------------------------------------------ set-up

    def make_engine(self) -> Engine:
        """Build the engine, not started yet; override to use another one."""
        directory = self._directory
        return LocalEngine(self.engine_config, None if directory is None else directory / "engine.log")

    def alignment(self, ranks: int) -> int:
        """Groups that every chunk must be a multiple of, so that each rank gets the same number of rows."""
        return group_alignment(generations=self.rollout.num_generations_per_prompt, dp_sizes=(ranks,))

    def prepare(self, tokenizer: Any, max_context_tokens: int, vocabulary: int) -> None:
        """Load and check all prompts, and the reward's signature. Nothing is started.

        Args:
            tokenizer: The policy's tokenizer.
            max_context_tokens: The policy's context.
            vocabulary: The policy's vocabulary size.

        Raises:
            DataError: a row cannot be used.
            ConfigError: the reward asks for a column that is not there, or the policy lacks a token of the tokenizer.
        """
        size, why = len(tokenizer), f"is more tokens than the policy's {vocabulary}"
        require(size <= vocabulary, "tokenizer", size, why, "use the policy's own")
        longest = max_context_tokens - self.rollout.max_response_tokens
        self._tokenizer = tokenizer
        self._train_set = PromptSet(self.prompts, tokenizer, longest)
        self._reward = RewardFunction(self.reward, self._train_set.columns, self.rollout.reward_timeout_s)
        if self.validation_prompts is not None:
            self._validation_set = PromptSet(self.validation_prompts, tokenizer, longest)
            RewardFunction(self.reward, self._validation_set.columns, self.rollout.reward_timeout_s)
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._stop_token_ids = ends if self.rollout.stop_token_ids is None else self.rollout.stop_token_ids
        # a collective, so it is asked for here and not by rank 0 alone
        self._directory = self._run_directory()
        if self._trainer().is_global_zero:
            self._engine = self.make_engine()
            self._collector = Collector(
                self._engine,
                self._train_set,
                PromptStream(len(self._train_set), self.run_seed, self.rollout.shuffle),
                self._reward,
                make_sampler(self.rollout),
                self.rollout,
                tokenizer=tokenizer,
                run_seed=self.run_seed,
                align=self.alignment(self._trainer().world_size),
                stop_token_ids=self._stop_token_ids,
            )
            if self._position and self._trainer().global_step > 0:
                self._collector.load_state_dict(self._position)

    def start_engine(self, spec: PolicySpec, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Start generation's process with the policy's weights; nothing happens if it runs already."""
        if self._threads is None and self.engine_config.trainer_threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(self.engine_config.trainer_threads)
        if self._engine is None or self._collector is None or self._engine_is_up:
            return
        self._collector.open()
        self._engine.start(spec)
        self._engine.update_weights(weights, policy_version)
        self._engine_is_up = True

    def start_rollouts(self, ppo_step: int, policy_version: int) -> None:
        """Start generating for training."""
        if self._collector is not None:
            self._has_rollouts = True
            self._collector.start(ppo_step, policy_version)

    def close(self) -> None:
        """Stop generation; safe to call twice, on every rank."""
        if self._collector is not None:
            if self._has_rollouts:
                self._position = self._collector.state_dict()
            self._collector.close()
        if self._engine is not None:
            self._engine.close()
        self._collector = self._engine = None
        self._engine_is_up = self._has_rollouts = False
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    # ------------------------------------------------------------------ what the PPO step asks for

    def refit(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Make the engine serve new weights (none: just the number), then let rollouts of that version start."""
        if self._engine is not None and self._collector is not None:
            self._engine.update_weights(weights, policy_version)
            self._collector.publish_version(policy_version)

    def release(self, draws: Sequence[int]) -> None:
        """Give the places of trained groups back."""
        if self._collector is not None:
            self._collector.release(draws)

    def record_chunks(self, ppo_step: int, chunks: Sequence[tuple[int, ...]]) -> None:
        """Append the step's chunk boundaries to `chunks.jsonl` in the run's folder."""
        directory = self._directory
        if self._trainer().is_global_zero and directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            ChunkSchedule.append(directory / "chunks.jsonl", ppo_step, chunks)

    def sample(self, prompts: Sequence[Prompt], *, namespace: str, num_samples: int = 1) -> list[Trajectory]:
        """Sample responses outside of training, with the validation sampling settings. A collective.

        Args:
            prompts: What to answer.
            namespace: Separates seeds from those of training.
            num_samples: Responses per prompt.
        """

        def work(poll: Callable[[], None]) -> list[Trajectory]:
            return self._rank_zero_collector().sample(
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
        return ChunkLoader(self._chunks)

    @override
    def val_dataloader(self) -> PromptBatches | list[Prompt]:
        return [] if self._validation_set is None else PromptBatches(self._validation_set, VALIDATION_BATCH)

    @override
    def predict_dataloader(self) -> PromptBatches | list[Prompt]:
        return self.val_dataloader()

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave rows on the host; micro-batches move when they are trained."""
        return batch

    def position(self) -> dict[str, Any]:
        """Return which prompts were trained, for a checkpoint: plain numbers and lists.

        Not Lightning's `state_dict`, which is stored under the class's name: a renamed subclass would lose its place.
        """
        return self._position if self._collector is None else self._collector.state_dict()

    def load_position(self, position: dict[str, Any]) -> None:
        """Continue with the first untrained prompt.

        Raises:
            CheckpointError: the position belongs to other prompts, or to another seed or shuffle setting.
        """
        if self._collector is not None and self._trainer().state.fn == TrainerFn.FITTING:
            self._collector.load_state_dict(position)
            self._position = position

    def _chunks(self) -> Iterator[Chunk]:
        size = self.rollout.num_prompts_per_step
        ppo_step, dispatched, index = self._trainer().global_step, 0, 0
        while dispatched < size:
            start = time.perf_counter()
            share = self._next_share(ppo_step, size - dispatched)
            dispatched += len(share.draws)
            yield Chunk(
                ppo_step=ppo_step,
                index=index,
                rows=share.rows,
                draws=share.draws,
                groups_dispatched=dispatched,
                groups_per_step=size,
                wait_s=time.perf_counter() - start,
                generation_s=share.generation_s,
            )
            index += 1

    def _next_share(self, ppo_step: int, remaining: int) -> Share:
        """Wait for a chunk on rank 0 and deal it out. A collective."""
        trainer = self._trainer()

        def work(poll: Callable[[], None]) -> list[Share]:
            groups = self._rank_zero_collector().next_groups(ppo_step, remaining, poll)
            return deal(groups, trainer.world_size)

        return self._relay().run(work)[trainer.global_rank]

    def _relay(self) -> Relay:
        strategy = self._trainer().strategy
        if not isinstance(strategy, StreamingPPOStrategy):
            name = type(strategy).__name__
            raise reject("strategy", name, "cannot deal rollouts out", "set strategy=StreamingPPOStrategy()")
        return strategy.relay

    def _rank_zero_collector(self) -> Collector:
        if self._collector is None:
            raise RolloutError("rollouts are not set up; run Trainer.fit, validate or predict")
        return self._collector

    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RolloutError("RolloutDataModule is not attached to a trainer; pass it to Trainer.fit")
        return self.trainer

    def _run_directory(self) -> Path | None:
        """The logger's folder; without a logger nothing is written."""
        trainer = self._trainer()
        return Path(trainer.log_dir) if trainer.loggers and trainer.log_dir is not None else None
