"""Defaults for optimizers, the linear schedule, and one-line errors for settings that torch refuses."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ppo.errors import ConfigError
from lightning_ppo.optimizers import build, default_critic_optimizer, default_learning_rate, default_policy_optimizer
from lightning_ppo.schedulers import LinearWarmupDecay


def rates(steps, **settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = LinearWarmupDecay(optimizer, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / 2)
        optimizer.step()
        schedule.step()
    return found


def test_linear_warmup_then_decay():
    assert rates(3, warmup_steps=4, total_steps=8, final_fraction=1.0) == pytest.approx([0.25, 0.5, 0.75])
    assert rates(6, total_steps=4, final_fraction=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates(3, warmup_steps=2, total_steps=2) == pytest.approx([0.5, 1.0, 0.0])
    assert rates(7, warmup_steps=3, total_steps=6) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])


@given(st.integers(0, 40), st.integers(1, 60), st.floats(0, 1))
def test_the_full_rate_is_reached_whatever_the_length(warmup, decay, final):
    found = rates(warmup + decay + 2, warmup_steps=warmup, total_steps=warmup + decay, final_fraction=final)
    peak = max(warmup - 1, 0)
    assert found[peak] == max(found) == pytest.approx(1.0)
    assert all(earlier < later for earlier, later in pairwise(found[: peak + 1]))
    assert all(earlier >= later for earlier, later in pairwise(found[peak:]))
    assert found[-2:] == pytest.approx([final, final])


@pytest.mark.parametrize(
    ("parameters", "rate"), [(1_000, 6e-4), (10**6, 6e-4), (135 * 10**6, 6e-4 / 135), (7 * 10**9, 1e-6)]
)
def test_default_rate_falls_with_size_between_two_bounds(parameters, rate):
    assert default_learning_rate(parameters, tiny=6e-4, large=1e-6) == pytest.approx(rate)


def test_default_optimizers():
    layer = torch.nn.Linear(2, 2)
    for make, rate in ((default_policy_optimizer, 6e-4), (default_critic_optimizer, 1e-3)):
        (group,) = make(layer.parameters()).param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (rate, (0.9, 0.99), 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 0}, "policy_scheduler.total_steps=0 is not a valid count; set a whole number >= 1"),
        ({"total_steps": -10}, "policy_scheduler.total_steps=-10 is not a valid count; set a whole number >= 1"),
        (
            {"warmup_steps": 9, "total_steps": 8},
            "policy_scheduler.warmup_steps=9 is above total_steps=8; set at most 8",
        ),
        ({"warmup_steps": -5}, "policy_scheduler.warmup_steps=-5 is not a valid count; set a whole number >= 0"),
        (
            {"final_fraction": -0.5},
            "policy_scheduler.final_fraction=-0.5 is out of range; set a finite number >= 0 and <= 1",
        ),
    ],
)
def test_a_schedule_never_climbs_the_loss(settings, message):
    """A negative rate would train towards worse responses."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    with pytest.raises(ConfigError) as caught:
        build("policy_scheduler", partial(LinearWarmupDecay, **settings), optimizer)
    assert str(caught.value) == message


def test_what_a_ppo_step_cannot_step():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^critic_optimizer=LBFGS computes the loss again .*; set another one$"):
        build("critic_optimizer", torch.optim.LBFGS, layer.parameters())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"^policy_scheduler=ReduceLROnPlateau needs a metric .*; set another one$"):
        build("policy_scheduler", torch.optim.lr_scheduler.ReduceLROnPlateau, optimizer)


def test_refused_settings_are_one_line():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^policy_optimizer=.* is refused \(.*-1.*\); correct its settings$"):
        build("policy_optimizer", partial(torch.optim.AdamW, lr=-1), layer.parameters())
