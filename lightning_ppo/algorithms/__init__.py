"""Pure functions on tensors: advantages, whitening, losses, KL, statistics. Imports nothing of the rest."""

from lightning_ppo.algorithms.advantages import estimate_advantages, gae, length_adaptive_lambda
from lightning_ppo.algorithms.importance import ImportanceWeights, importance_weights
from lightning_ppo.algorithms.kl import kl_estimate, kl_loss_terms
from lightning_ppo.algorithms.losses import PolicyLoss, ValueLoss, aggregate, policy_loss, value_loss
from lightning_ppo.algorithms.masking import masked_mean, masked_sum, zero_masked
from lightning_ppo.algorithms.rewards import token_rewards
from lightning_ppo.algorithms.statistics import ExplainedVariance, ratio_or_nan, token_entropy
from lightning_ppo.algorithms.whitening import (
    EPSILON,
    Moments,
    RunningCentre,
    apply_whitening,
    merge_moments,
    whitening_of,
)

__all__ = [
    "EPSILON",
    "ExplainedVariance",
    "ImportanceWeights",
    "Moments",
    "PolicyLoss",
    "RunningCentre",
    "ValueLoss",
    "aggregate",
    "apply_whitening",
    "estimate_advantages",
    "gae",
    "importance_weights",
    "kl_estimate",
    "kl_loss_terms",
    "length_adaptive_lambda",
    "masked_mean",
    "masked_sum",
    "merge_moments",
    "policy_loss",
    "ratio_or_nan",
    "token_entropy",
    "token_rewards",
    "value_loss",
    "whitening_of",
    "zero_masked",
]
