"""Streaming PPO with a separate critic for language models, as a PyTorch Lightning plugin.

Names are imported on first use: the generation process needs parts of this package, but not Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ppo.callbacks import (
        CheckpointExclusion,
        CriticEpochs,
        CriticWarmup,
        FrozenCritic,
        PPOProgressBar,
        RunLog,
        SampleTable,
        StepCheckpoint,
        WeightRefit,
    )
    from lightning_ppo.config import PPOConfig
    from lightning_ppo.export import export_checkpoint
    from lightning_ppo.hooks import PPOCallback
    from lightning_ppo.module import PPOModule
    from lightning_ppo.rollout.config import RolloutConfig
    from lightning_ppo.rollout.datamodule import RolloutDataModule
    from lightning_ppo.rollout.failure_config import FailureConfig
    from lightning_ppo.rollout.local.config import LocalEngineConfig
    from lightning_ppo.rollout.ray.config import RayConfig
    from lightning_ppo.rollout.vllm.config import VLLMConfig
    from lightning_ppo.strategy import StreamingPPOStrategy

__version__ = "0.1.0"

_HOME = {
    "CheckpointExclusion": "lightning_ppo.callbacks",
    "CriticEpochs": "lightning_ppo.callbacks",
    "CriticWarmup": "lightning_ppo.callbacks",
    "FrozenCritic": "lightning_ppo.callbacks",
    "LocalEngineConfig": "lightning_ppo.rollout.local.config",
    "PPOCallback": "lightning_ppo.hooks",
    "PPOConfig": "lightning_ppo.config",
    "PPOModule": "lightning_ppo.module",
    "PPOProgressBar": "lightning_ppo.callbacks",
    "FailureConfig": "lightning_ppo.rollout.failure_config",
    "RolloutConfig": "lightning_ppo.rollout.config",
    "RolloutDataModule": "lightning_ppo.rollout.datamodule",
    "RunLog": "lightning_ppo.callbacks",
    "SampleTable": "lightning_ppo.callbacks",
    "StepCheckpoint": "lightning_ppo.callbacks",
    "RayConfig": "lightning_ppo.rollout.ray.config",
    "StreamingPPOStrategy": "lightning_ppo.strategy",
    "VLLMConfig": "lightning_ppo.rollout.vllm.config",
    "WeightRefit": "lightning_ppo.callbacks",
    "export_checkpoint": "lightning_ppo.export",
}

__all__ = [
    "CheckpointExclusion",
    "CriticEpochs",
    "CriticWarmup",
    "FailureConfig",
    "FrozenCritic",
    "LocalEngineConfig",
    "PPOCallback",
    "PPOConfig",
    "PPOModule",
    "PPOProgressBar",
    "RolloutConfig",
    "RayConfig",
    "RolloutDataModule",
    "RunLog",
    "SampleTable",
    "StepCheckpoint",
    "StreamingPPOStrategy",
    "VLLMConfig",
    "WeightRefit",
    "export_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported yet or not."""
    return sorted([*__all__, "__version__"])
