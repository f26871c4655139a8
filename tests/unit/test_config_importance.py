"""Settings of the importance correction and of the old log-probs: what fits together, and the bounds that result."""

from typing import get_args

import pytest

from lightning_ppo.algorithms.importance import CorrectionKind
from lightning_ppo.config import PPOConfig
from lightning_ppo.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[
            (
                {"importance_correction": kind, "importance_clip_min": 3.0, "importance_clip_max": 2.5},
                "importance_clip_min=3.0 is above importance_clip_max=2.5; "
                "set importance_clip_min <= importance_clip_max",
            )
            for kind in ("truncated", "sequence", "icepop", "sequence_mask")
        ],
        (
            {"importance_correction": "truncated", "importance_clip_min": 2.5},
            "importance_clip_min=2.5 is above importance_clip_max=2.0; set importance_clip_min <= importance_clip_max",
        ),
        *[
            (
                {"importance_correction": kind, name: 0.5},
                f"{name}=0.5 has no effect with importance_correction={kind}; drop it",
            )
            for kind in ("none", "token")
            for name in ("importance_clip_min", "importance_clip_max")
        ],
        *[
            (
                {"importance_correction": kind, "importance_clip_min": low},
                f"importance_clip_min={low} is no lower bound for importance_correction={kind}; "
                f"set it above 0, e.g. {example}",
            )
            for kind, example in (("icepop", 0.5), ("sequence_mask", 0.999))
            for low in (None, 0)
        ],
        *[
            (
                {"importance_correction": kind, "importance_clip_min": low, "importance_clip_max": high},
                f"{name} would drop what the policy itself sampled (weight 1) with importance_correction={kind}; {fix}",
            )
            for kind in ("icepop", "sequence_mask")
            for low, high, name, fix in (
                (0.1, 0.8, "importance_clip_max=0.8", "set it >= 1"),
                (1.1, 1.5, "importance_clip_min=1.1", "set it <= 1"),
            )
        ],
    ],
)
def test_bounds_that_do_not_fit(settings, message):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (0.0, 2.0)),
        ({"importance_correction": "token"}, (0.0, 2.0)),
        ({"importance_correction": "truncated"}, (0.0, 2.0)),
        ({"importance_correction": "truncated", "importance_clip_max": 0.8}, (0.0, 0.8)),
        ({"importance_correction": "sequence", "importance_clip_min": 0.5}, (0.5, 2.0)),
        ({"importance_correction": "icepop", "importance_clip_min": 0.5, "importance_clip_max": 5.0}, (0.5, 5.0)),
        (
            {"importance_correction": "sequence_mask", "importance_clip_min": 0.999, "importance_clip_max": 1.002},
            (0.999, 1.002),
        ),
        ({"importance_correction": "icepop", "importance_clip_min": 1, "importance_clip_max": 1}, (1, 1)),
    ],
)
def test_bounds_of_importance_weights(settings, bounds):
    assert PPOConfig(**settings).importance_bounds == bounds


@pytest.mark.parametrize("kind", get_args(CorrectionKind))
def test_every_correction_can_be_chosen(kind):
    bounds = {"importance_clip_min": 0.9} if kind in ("icepop", "sequence_mask") else {}
    assert PPOConfig(importance_correction=kind, **bounds).importance_correction == kind


@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("mode", ["running", "batch", "chunk", "off"])
def test_old_logprobs_fit_every_normalisation(old, epochs, mode):
    """A streamed step allows less: `checks.check_algorithm` knows whether the run streams."""
    config = PPOConfig(old_logprobs=old, ppo_epochs=epochs, normalize_advantages=mode)
    assert config.ratio_is_one == (old == "recompute" and epochs == 1)


@pytest.mark.parametrize("kind", ["token", "truncated", "sequence", "icepop", "sequence_mask"])
def test_weights_of_1_are_refused(kind):
    bounds = {} if kind == "token" else {"importance_clip_min": 0.5}
    with pytest.raises(ConfigError, match=rf"^importance_correction={kind} has no effect with old_logprobs=rollout "):
        PPOConfig(old_logprobs="rollout", importance_correction=kind, **bounds)
