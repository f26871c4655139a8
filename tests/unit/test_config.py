"""Settings check themselves: one line, `<field>=<value> <why>; <what instead>`."""

import dataclasses
import re

import pytest

from lightning_ppo.config import PPOConfig
from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.local.config import LocalEngineConfig

ONE_LINE = re.compile(r"^\w+=\S[^;\n]*; [^;\n]+$")
NAN, INF = float("nan"), float("inf")

PPO = [
    ("gamma", -0.1),
    ("gamma", 1.1),
    ("gamma", NAN),
    ("gamma", "0.9"),
    ("gae_lambda", 2),
    ("gae_lambda_value", -1),
    ("gae_lambda_policy", 1.5),
    ("length_adaptive_alpha", -1),
    ("normalize_advantages", "whiten"),
    ("running_mean_decay", 1.0),
    ("running_mean_decay", -0.1),
    ("clip_eps", 0),
    ("clip_eps", -0.2),
    ("clip_eps", 1.5),
    ("clip_eps_high", 0),
    ("dual_clip", 1.0),
    ("dual_clip", 0.5),
    ("dual_clip", INF),
    ("loss_level", "batch"),
    ("ppo_epochs", 0),
    ("ppo_epochs", 1.5),
    ("ppo_epochs", True),
    ("policy_minibatches", 0),
    ("old_logprobs", "engine"),
    ("importance_correction", "mean"),
    ("importance_clip_max", 0),
    ("importance_clip_max", NAN),
    ("importance_clip_max", INF),
    ("importance_clip_max", 1.5),
    ("importance_clip_min", -1),
    ("importance_clip_min", NAN),
    ("importance_clip_min", 0.5),
    ("kl_placement", "both"),
    ("kl_coef", -0.1),
    ("kl_coef", 0.1),
    ("kl_type", "k4"),
    ("entropy_coef", -1),
    ("truncated_responses", "drop"),
    ("truncation_penalty", -1),
    ("max_grad_norm", 0),
    ("max_grad_norm", -1),
    ("critic_warmup_steps", -1),
    ("critic_ppo_epochs", 0),
    ("critic_minibatches", 0),
    ("value_clip_eps", 0),
    ("value_loss_scale", 0),
    ("max_critic_grad_norm", 0),
    ("micro_batch_tokens", 0),
]

ROLLOUT = [
    ("num_prompts_per_step", 0),
    ("num_prompts_per_step", 2.0),
    ("num_generations_per_prompt", 0),
    ("min_groups_for_streaming_train", 0),
    ("min_groups_for_streaming_train", 33),
    ("sampler", "newest"),
    ("max_lookahead_versions", -1),
    ("max_buffered_rollouts", 31),
    ("max_inflight_prompts", 0),
    ("max_response_tokens", 0),
    ("temperature", 0),
    ("temperature", -1),
    ("temperature", NAN),
    ("top_p", 0.9),
    ("top_k", 5),
    ("validation_temperature", -0.1),
    ("validation_top_p", 0),
    ("validation_top_p", 1.1),
    ("validation_top_k", -1),
    # greedy
    ("validation_top_p", 0.9),
    ("validation_top_k", 5),
    ("stop_token_ids", (1, -1)),
    ("stop_token_ids", (1.0,)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", 1),
    ("seed", -1),
    ("timeout_s", 0),
    ("timeout_s", INF),
    ("reward_timeout_s", 0),
]

ENGINE = [
    ("slots", 0),
    ("num_threads", 0),
    ("trainer_threads", 0),
    ("device", "gpu"),
    ("device", "cuda:first"),
    ("device", None),
    ("dtype", "float16"),
    ("backend", "vllm"),
    ("start_timeout_s", 0),
    ("update_timeout_s", -1),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (kind, *case)
        for kind, cases in ((PPOConfig, PPO), (RolloutConfig, ROLLOUT), (LocalEngineConfig, ENGINE))
        for case in cases
    ],
)
def test_bad_value_is_rejected_in_one_line_that_names_the_field(kind, field, value):
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}=")
    assert ONE_LINE.match(message), message
    assert len(message) <= 200


@pytest.mark.parametrize("kind", [PPOConfig, RolloutConfig, LocalEngineConfig])
def test_defaults_are_valid_and_frozen(kind):
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 0)


@pytest.mark.parametrize("kind", [PPOConfig, RolloutConfig, LocalEngineConfig])
def test_every_setting_is_documented(kind):
    """`--help` shows the docstring: each field has a line there, and no line is left over."""
    documented = re.findall(r"^ {8}(\w+): ", kind.__doc__, flags=re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_placement": "loss"}, "kl_coef=0 switches kl_placement=loss off; set kl_coef > 0, or kl_placement=none"),
        ({"kl_coef": 0.1}, "kl_coef=0.1 has no effect with kl_placement=none; set kl_placement=reward or loss"),
        (
            {"truncated_responses": "mask", "bootstrap_truncated": True},
            "bootstrap_truncated=True has no effect with truncated_responses=mask; "
            "set truncated_responses=keep or penalize, or bootstrap_truncated=false",
        ),
        (
            {"truncation_penalty": 5.0},
            "truncation_penalty=5.0 has no effect with truncated_responses=keep; "
            "set truncated_responses=penalize, or drop it",
        ),
        (
            {"old_logprobs": "rollout", "importance_correction": "token"},
            "importance_correction=token has no effect with old_logprobs=rollout (every weight is 1); "
            "set importance_correction=none, or old_logprobs=recompute",
        ),
    ],
)
def test_pairs_that_do_not_fit(settings, message):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(("window", "need"), [(0, 8), (1, 16), (3, 32)])
def test_capacity_that_would_deadlock_names_the_number(window, need):
    """Pitfall 80."""
    settings = {"num_prompts_per_step": 8, "min_groups_for_streaming_train": 8, "max_lookahead_versions": window}
    settings["max_trajectory_age_steps"] = max(window, 1)
    with pytest.raises(ConfigError, match=rf"max_buffered_rollouts={need - 1} would deadlock; .* = {need}$"):
        RolloutConfig(**settings, max_buffered_rollouts=need - 1)
    assert RolloutConfig(**settings, max_buffered_rollouts=need).buffer_capacity == need
    assert RolloutConfig(**settings).buffer_capacity == 8 * (window + 2)


@pytest.mark.parametrize(
    ("settings", "updates", "ratio_is_one"),
    [
        ({}, 1, True),
        ({"ppo_epochs": 3}, 3, False),
        ({"policy_minibatches": 4}, 4, False),
        ({"ppo_epochs": 2, "policy_minibatches": 4}, 8, False),
        ({"old_logprobs": "rollout"}, 1, False),
    ],
)
def test_derived_ppo_settings(settings, updates, ratio_is_one):
    config = PPOConfig(**settings)
    assert (config.updates_per_step, config.ratio_is_one) == (updates, ratio_is_one)


@pytest.mark.parametrize(
    ("settings", "streams", "lead"),
    [
        ({}, True, 0),
        ({"min_groups_for_streaming_train": 32}, False, 0),
        ({"max_lookahead_versions": 1}, True, 1),
        ({"max_lookahead_versions": 1, "warmup_generation_lead_steps": 4}, True, 4),
    ],
)
def test_derived_rollout_settings(settings, streams, lead):
    config = RolloutConfig(**settings)
    assert (config.is_streaming, config.peak_lead) == (streams, lead)
