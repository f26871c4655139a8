"""Threads, cores and open files of the trainer's process while an engine runs beside it."""

import os
from dataclasses import dataclass

import torch

from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.open_files import raise_limit, restore_limit


@dataclass(frozen=True)
class TrainerProcess:
    """What the process had before; `release` puts it back."""

    threads: int
    cores: frozenset[int] | None
    """None where the platform knows no affinity, or it was left alone."""
    open_files: int | None = None
    """Limit on open files; None where it was left alone."""

    @classmethod
    def confine(cls, engine: LocalEngineConfig | VLLMConfig) -> "TrainerProcess":
        """Confine this process to what the engine's settings leave it, and let it open the files that it needs.

        Args:
            engine: Settings of the engine.
        """
        threads = torch.get_num_threads()
        if engine.trainer_threads is not None:
            torch.set_num_threads(engine.trainer_threads)
        cores = None
        if isinstance(engine, VLLMConfig) and engine.trainer_cores and hasattr(os, "sched_setaffinity"):
            cores = frozenset(os.sched_getaffinity(0))
            os.sched_setaffinity(0, engine.trainer_cores)
        # a request in flight is a connection, and there may be thousands
        return cls(threads, cores, raise_limit() if isinstance(engine, VLLMConfig) else None)

    def release(self) -> None:
        """Undo it."""
        torch.set_num_threads(self.threads)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        restore_limit(self.open_files)
