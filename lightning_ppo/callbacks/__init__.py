"""Callbacks that are in charge of the phases of a PPO step, and those that show what happens in it."""

from lightning_ppo.callbacks.checkpoint_exclusion import CheckpointExclusion
from lightning_ppo.callbacks.critic_epochs import CriticEpochs, FrozenCritic
from lightning_ppo.callbacks.critic_warmup import CriticWarmup
from lightning_ppo.callbacks.progress import PPOProgressBar, use_ppo_progress_bar
from lightning_ppo.callbacks.refit import WeightRefit
from lightning_ppo.callbacks.run_log import RunLog
from lightning_ppo.callbacks.samples import SampleTable
from lightning_ppo.callbacks.step_checkpoint import StepCheckpoint

__all__ = [
    "CheckpointExclusion",
    "CriticEpochs",
    "CriticWarmup",
    "FrozenCritic",
    "PPOProgressBar",
    "RunLog",
    "SampleTable",
    "StepCheckpoint",
    "WeightRefit",
    "use_ppo_progress_bar",
]
