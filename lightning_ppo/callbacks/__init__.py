"""Callbacks that are in charge of the phases of a PPO step."""

from lightning_ppo.callbacks.checkpoint_exclusion import CheckpointExclusion
from lightning_ppo.callbacks.critic_epochs import CriticEpochs
from lightning_ppo.callbacks.critic_warmup import CriticWarmup
from lightning_ppo.callbacks.refit import WeightRefit

__all__ = ["CheckpointExclusion", "CriticEpochs", "CriticWarmup", "WeightRefit"]
