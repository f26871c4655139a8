"""Building what generates for training: engine, collector, and whatever an earlier run left to be repeated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.engine import Engine
from lightning_ppo.rollout.failures import check_drops
from lightning_ppo.rollout.journal import Journal
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.snapshot import JOURNAL, rollout_fingerprint
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.tail import group_alignment
from lightning_ppo.rollout.vllm.config import RayConfig, VLLMConfig
from lightning_ppo.validation import require

SCHEDULE = "schedule.jsonl"
"""File of chunk boundaries and trained groups in a run's folder."""


@dataclass(frozen=True)
class RunPlace:
    """What a collector must know of its run."""

    run_seed: int
    ranks: int
    """Data-parallel ranks that share every chunk."""
    warmup_steps: int
    """PPO steps that leave the policy as it is."""
    directory: Path | None
    """The run's folder; None writes nothing."""


def build_engine(
    settings: LocalEngineConfig | VLLMConfig,
    ray: RayConfig,
    rollout: RolloutConfig,
    directory: Path | None,
    say: Callable[[str], None],
) -> Engine:
    """Build the engine that these settings describe, not started yet."""
    if isinstance(settings, LocalEngineConfig):
        return LocalEngine(settings, None if directory is None else directory / "engine.log")
    from lightning_ppo.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(
        settings,
        directory,
        rollout.recompute_kv_cache_after_weight_updates,
        lambda name, state, seconds: say(f"{name} is {state} after {seconds:.1f} s"),
        can_sleep=rollout.colocated,
    )


def build_collector(
    engine: Engine,
    prompts: PromptSet,
    reward: RewardFunction,
    config: RolloutConfig,
    place: RunPlace,
    *,
    tokenizer: Any,
    stop_token_ids: tuple[int, ...],
    is_reproducible: bool,
) -> Collector:
    """Build the collector of a run.

    Args:
        engine: Generates.
        prompts: The data set.
        reward: Rewards.
        config: Settings.
        place: The run.
        tokenizer: Decodes.
        stop_token_ids: Tokens that end a response.
        is_reproducible: Whether the engine's responses depend on request, seed and weights only.

    Raises:
        ConfigError: settings that do not fit together.
        DataError: a recording cannot be used.
        CheckpointError: a recorded journal is damaged.
    """
    align = group_alignment(generations=config.num_generations_per_prompt, dp_sizes=(place.ranks,))
    recorded = schedule = None
    sampler = make_sampler(config, place.warmup_steps)
    if config.replay_schedule is not None:
        fingerprint = rollout_fingerprint(prompts, place.run_seed, config, stop_token_ids)
        recorded = _recording(config.replay_schedule, prompts, fingerprint, is_reproducible)
        schedule = ChunkSchedule.load(config.replay_schedule)
    check_drops(
        config.failures,
        samplers_stamp=sampler.capabilities.stamps_targets,
        align=align,
        groups_per_step=config.num_prompts_per_step,
        generations=config.num_generations_per_prompt,
        row_multiple=place.ranks,
    )
    return Collector(
        engine,
        prompts,
        PromptStream(len(prompts), place.run_seed, config.shuffle),
        reward,
        sampler if recorded is None else recorded.sampler,
        config,
        tokenizer=tokenizer,
        run_seed=place.run_seed,
        align=align,
        stop_token_ids=stop_token_ids,
        schedule=schedule,
        recorded=recorded,
        warmup_steps=place.warmup_steps,
        directory=place.directory,
    )


def _recording(path: str, prompts: PromptSet, fingerprint: str, is_reproducible: bool) -> RecordedRun:
    journal = Path(path).parent / JOURNAL
    groups = Journal.read(journal, fingerprint, prompts) if journal.is_dir() else []
    recorded = RecordedRun.load(path, groups)
    require(
        is_reproducible or not recorded.generates,
        "replay_schedule",
        path,
        "has no recorded responses, and this engine's depend on what else is generated at the time",
        "record with record_rollouts=True, or set engine=local",
    )
    return recorded
