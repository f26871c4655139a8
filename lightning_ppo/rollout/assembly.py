"""Building what generates: engine, collector, and whatever an earlier run left to be repeated."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.data_sets import DataSets
from lightning_ppo.rollout.engine import Engine, EngineName
from lightning_ppo.rollout.generators import Generators
from lightning_ppo.rollout.journal import Journal
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.run_header import RunHeader
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.schedule_log import ScheduleLog
from lightning_ppo.rollout.snapshot import JOURNAL, rollout_fingerprint
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.tail import group_alignment
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.devices import place_servers, uses_cuda, visible
from lightning_ppo.validation import check_choice, check_kind, require

if TYPE_CHECKING:
    from lightning_ppo.rollout.ray.runtime import RayRuntime

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
    max_steps: int | None = None
    """PPO steps after which training ends; negative: never; None: this run does not train."""


def chosen_engine(engine: str, local: LocalEngineConfig, vllm: VLLMConfig) -> LocalEngineConfig | VLLMConfig:
    """Return the settings of the engine that `engine` names.

    Raises:
        ConfigError: there is no such engine, the other one was set as well, or settings are of another class.
    """
    check_kind("local", local, LocalEngineConfig)
    check_kind("vllm", vllm, VLLMConfig)
    check_choice("engine", engine, get_args(EngineName))
    name, other, default = ("vllm", vllm, VLLMConfig()) if engine == "local" else ("local", local, LocalEngineConfig())
    require(other == default, name, other, f"is not read by engine={engine}", f"set engine={name}, or drop it")
    return local if engine == "local" else vllm


def build_ray(
    engine: LocalEngineConfig | VLLMConfig, rollout: RolloutConfig, ray: RayConfig, trainer_devices: Sequence[int] = ()
) -> "RayRuntime | None":
    """Build Ray's runtime if these settings need one, not started yet.

    Args:
        engine: Settings of the engine.
        rollout: Settings of the rollouts.
        ray: Settings of Ray.
        trainer_devices: Numbers of the GPUs that the trainer uses on this machine.

    Raises:
        ConfigError: Ray is needed and not installed; or see `place_servers`.
    """
    servers = engine.num_servers if isinstance(engine, VLLMConfig) and engine.placement == "ray" else 0
    if not servers and not rollout.reward_workers:
        return None
    field, value = ("vllm.placement", "ray") if servers else ("reward_workers", str(rollout.reward_workers))
    require(find_spec("ray") is not None, field, value, "needs Ray", "install lightning-ppo[ray]")
    from lightning_ppo.rollout.ray.resources import cpus_needed
    from lightning_ppo.rollout.ray.runtime import RayRuntime

    gpus = None
    if isinstance(engine, VLLMConfig) and servers and ray.address in (None, "local"):
        placed = place_servers(engine, trainer_devices, colocated=rollout.colocated)
        gpus = visible(placed.devices, os.environ.get("CUDA_VISIBLE_DEVICES", "")) if placed.devices else None
    num_cpus = cpus_needed(ray, servers, rollout.reward_workers)
    return RayRuntime(ray, num_cpus=num_cpus, gpus=gpus, wanted_by=f"{field}={value}")


def build_engine(
    settings: LocalEngineConfig | VLLMConfig,
    rollout: RolloutConfig,
    directory: Path | None,
    ray: "RayRuntime | None",
    say: Callable[[str], None],
    trainer_devices: Sequence[int] = (),
) -> Engine:
    """Build the engine that these settings describe, not started yet.

    Args:
        settings: Settings of the engine.
        rollout: Settings of the rollouts.
        directory: Where logs go; None keeps them in temporary files.
        ray: Places vLLM servers, if the settings say so; started before the engine.
        say: Reports progress.
        trainer_devices: Numbers of the GPUs that the trainer uses on this machine.

    Raises:
        ConfigError: the built-in engine's device is not there; or see `place_servers`.
    """
    if isinstance(settings, LocalEngineConfig):
        settings.check_device()
        return LocalEngine(settings, None if directory is None else directory / "engine.log")
    from lightning_ppo.rollout.vllm.engine import VLLMEngine
    from lightning_ppo.rollout.vllm.launch import Command, Launcher

    make_launcher, is_here = None, None
    if settings.placement == "subprocess" or ray is None or ray.config.address in (None, "local"):
        settings = place_servers(settings, trainer_devices, colocated=rollout.colocated)
    if ray is not None and settings.placement == "ray":
        from lightning_ppo.rollout.ray.servers import RayLauncher

        def make_launcher(command: Command) -> Launcher:
            return RayLauncher(ray, settings, command, directory, on_gpus=uses_cuda(settings))

        is_here = ray.config.address in (None, "local")
    return VLLMEngine(
        settings,
        directory,
        rollout.recompute_kv_cache_after_weight_updates,
        lambda name, state, seconds: say(f"{name} is {state} after {seconds:.1f} s"),
        can_sleep=rollout.colocated,
        make_launcher=make_launcher,
        is_here=is_here,
    )


def build_generators(
    engine: Engine,
    data: DataSets,
    config: RolloutConfig,
    place: RunPlace,
    ray: "RayRuntime | None",
    *,
    tokenizer: Any,
    is_reproducible: bool,
) -> Generators:
    """Build everything that generates, none of it started yet.

    Args:
        engine: Generates.
        data: Prompts, reward, and the tokens that end a response.
        config: Settings.
        place: The run.
        ray: Places servers and reward workers; None without.
        tokenizer: Decodes.
        is_reproducible: Whether the engine's responses depend on request, seed and weights only.

    Raises:
        ConfigError: see `build_collector`.
        DataError: see `build_collector`.
        CheckpointError: see `build_collector`.
    """
    collector, schedule = build_collector(
        engine,
        data.train,
        data.reward,
        config,
        place,
        tokenizer=tokenizer,
        stop_token_ids=data.stop_token_ids,
        is_reproducible=is_reproducible,
    )
    return Generators(engine, collector, data, config, ray, schedule)


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
) -> tuple[Collector, ScheduleLog]:
    """Build the collector of a run, and what writes its schedule.

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
    recorded = None
    sampler = make_sampler(config, place.warmup_steps)
    stream = PromptStream(len(prompts), place.run_seed, config.shuffle)
    header = RunHeader.of(
        config,
        seed=place.run_seed,
        prompts=prompts.fingerprint,
        stop_token_ids=stop_token_ids,
        warmup_steps=place.warmup_steps,
    )
    if config.replay_schedule is not None and place.max_steps is not None:
        fingerprint = rollout_fingerprint(prompts, place.run_seed, config, stop_token_ids)
        read = partial(Journal.read, fingerprint=fingerprint, prompts=prompts, row_of=stream.row_of)
        recorded = _recording(config.replay_schedule, read, header, place, is_reproducible)
    collector = Collector(
        engine,
        prompts,
        stream,
        reward,
        sampler if recorded is None else recorded.sampler,
        config,
        tokenizer=tokenizer,
        run_seed=place.run_seed,
        align=align,
        stop_token_ids=stop_token_ids,
        schedule=None if recorded is None else recorded.chunks,
        recorded=recorded,
        warmup_steps=place.warmup_steps,
        directory=place.directory,
    )
    path = None if place.directory is None else place.directory / SCHEDULE
    return collector, ScheduleLog(path, header, recorded)


def _recording(
    path: str,
    read_journal: Callable[[Path], list[PromptGroup]],
    header: RunHeader,
    place: RunPlace,
    is_reproducible: bool,
) -> RecordedRun:
    folder = Path(path).parent
    if place.directory is not None:
        is_other = folder.resolve() != place.directory.resolve()
        why = "is this run's own, which it would write over"
        require(is_other, "replay_schedule", path, why, "give the replay a folder of its own")
    recorded = RecordedRun.load(path, header, place.max_steps or 0, lambda: read_journal(folder / JOURNAL))
    require(
        is_reproducible or not recorded.generates,
        "replay_schedule",
        path,
        "has no recorded responses, and this engine's depend on what else is generated at the time",
        "record with record_rollouts=True, or set engine=local",
    )
    return recorded
