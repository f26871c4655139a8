"""Threads and cores of the trainer's process while an engine computes beside it on the same machine."""

import os
from dataclasses import dataclass

import torch

from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.vllm.config import VLLMConfig


@dataclass(frozen=True)
class TrainerProcess:
    """What the process had before; `release` puts it back."""

    threads: int
    cores: frozenset[int] | None
    """None where the platform knows no affinity, or it was left alone."""

    @classmethod
    def confine(cls, engine: LocalEngineConfig | VLLMConfig) -> "TrainerProcess":
        """Confine this process to what the engine's settings leave it.

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
        return cls(threads, cores)

    def release(self) -> None:
        """Undo it."""
        torch.set_num_threads(self.threads)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
