"""From critic warm-up to training, for every window: nothing blocks, nothing is discarded, nothing gets too old."""

from collections.abc import Iterator

import pytest

from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import InOrderSampler, ReadyFirstSampler, Sampler, WeightFifoSampler
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import make_prompt, make_trajectory

GATED = [InOrderSampler, ReadyFirstSampler, WeightFifoSampler]
P = 2
ROWS = [make_trajectory(version=version) for version in range(30)]


def windows(warmup: int) -> Iterator[VersionWindow]:
    """Every (A, L) up to 6 for this W, with as much lookahead as the age allows, and with none."""
    for age in range(7):
        for lead in (None, *(range(age, 7) if warmup else ())):
            for lookahead in {0, age}:
                yield VersionWindow(lookahead, age, warmup, lead)


def walk(kind: type, window: VersionWindow, capacity: int) -> tuple[list[int], int, int]:
    """Train past the transition with generation as fast as the gate allows.

    Returns:
        Policy age of every trained group; most slots taken while no step was held, and altogether.
    """
    sampler: Sampler = kind(P, window)
    buffer = ReplayBuffer(capacity, 1)
    waiting = None
    draw = 0
    ages: list[int] = []
    most_waiting = most = 0
    for step in range(window.warmup_steps + window.max_age + window.peak_lead + 4):
        # twice: while the last step still holds its slots (its critic trains), and after they were freed
        for held in (True, False):
            if not held:
                buffer.release(group.draw for group in buffer.claimed())
            while buffer.has_room and (waiting := waiting or sampler.admit(step)):
                buffer.commit(
                    buffer.reserve(draw, make_prompt(), step, waiting.target_step).group_id, [ROWS[step]], step
                )
                draw, waiting = draw + 1, None
            most = max(most, buffer.occupied)
        most_waiting = max(most_waiting, buffer.occupied)
        assert not buffer.stale(window.oldest_allowed(step)), f"discarded at step {step}"
        assert not sampler.evict(buffer, step, step), f"evicted at step {step}"
        groups = sampler.select(buffer, step, step, P)
        assert len(groups) == P, f"deadlock at step {step}"
        assert [group.target_step for group in groups] == [step if kind is InOrderSampler else None] * P
        ages += [window.policy_age(step, group.start_version) for group in groups]
        buffer.claim(groups)
    return ages, most_waiting, most


@pytest.mark.parametrize("warmup", range(7))
@pytest.mark.parametrize("kind", GATED)
def test_no_window_deadlocks_discards_or_exceeds_its_age(kind: type, warmup: int) -> None:
    for window in windows(warmup):
        need = kind(P, window).required_capacity(P)
        default = (window.peak_lead + 1) * P + P
        ages, waiting, most = walk(kind, window, default)
        assert max(ages) == window.peak_policy_age <= window.max_age, window
        assert waiting == need, window
        assert most <= default, window
        # with the fewest slots everything goes on too
        ages, waiting, most = walk(kind, window, need)
        assert max(ages) <= window.max_age, window
        assert waiting == most == need, window


@pytest.mark.parametrize("kind", GATED)
def test_on_policy_samplers_never_train_an_older_policy(kind: type) -> None:
    for window in (window for warmup in range(4) for window in windows(warmup)):
        ages, _, _ = walk(kind, window, (window.peak_lead + 2) * P)
        assert kind(P, window).is_on_policy is (max(ages) == 0), window


def test_the_default_capacity_of_a_config_is_enough_and_the_walk_is_not_vacuous() -> None:
    config = RolloutConfig(
        num_prompts_per_step=P,
        min_groups_for_streaming_train=P,
        max_lookahead_versions=1,
        warmup_generation_lead_steps=4,
    )
    window = VersionWindow.of(config, 4)
    ages, waiting, most = walk(InOrderSampler, window, config.buffer_capacity)
    assert (max(ages), waiting, most) == (1, 10, 12)
    assert config.buffer_capacity == 12
