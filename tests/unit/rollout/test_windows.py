import pytest

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.windows import VersionWindow


def test_lead_of_the_specified_table() -> None:
    window = VersionWindow(lookahead=1, max_age=1, warmup_steps=4, warmup_lead=4)
    assert [window.lead(version) for version in range(7)] == [4, 4, 3, 2, 1, 1, 1]
    assert window.peak_lead == 4


@pytest.mark.parametrize(
    ("window", "leads"),
    [
        (VersionWindow(0, 0), [0, 0, 0, 0]),
        (VersionWindow(2, 3), [2, 2, 2, 2]),
        (VersionWindow(0, 1, 3, None), [0, 0, 0, 0]),
        # without lookahead the gate shuts at W, although the rollouts for W + A are there already
        (VersionWindow(0, 1, 3, 2), [2, 2, 2, 0]),
        # a lead beyond the frontier W + A is never reached
        (VersionWindow(1, 1, 2, 6), [3, 2, 1, 1]),
        (VersionWindow(0, 0, 2, 6), [2, 1, 0, 0]),
    ],
)
def test_lead(window: VersionWindow, leads: list[int]) -> None:
    assert [window.lead(version) for version in range(4)] == leads
    assert window.peak_lead == max(leads)


# The age rule's `<=`.
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("age", [0, 1, 2])
def test_a_frozen_rollout_is_usable_at_the_frontier_and_not_beyond(warmup: int, age: int) -> None:
    window = VersionWindow(age, age, warmup)
    frontier = warmup + age
    assert window.policy_age(frontier, 0) == age
    assert window.oldest_allowed(frontier) == 0
    assert window.policy_age(frontier + 1, 0) == age + 1
    assert window.oldest_allowed(frontier + 1) == warmup + 1


def test_age_counts_updates_of_the_policy_only() -> None:
    window = VersionWindow(1, 1, 4)
    assert [window.policy_age(4, version) for version in range(5)] == [0] * 5
    assert [window.policy_age(6, version) for version in range(7)] == [2, 2, 2, 2, 2, 1, 0]
    assert VersionWindow(1, 1).policy_age(6, 4) == 2


def test_oldest_allowed_is_the_lowest_version_within_the_age() -> None:
    for warmup in range(5):
        for age in range(4):
            window = VersionWindow(0, age, warmup)
            for version in range(12):
                allowed = [old for old in range(version + 1) if window.policy_age(version, old) <= age]
                assert window.oldest_allowed(version) == min(allowed)
                assert allowed == list(range(min(allowed), version + 1))


def test_window_of_a_config() -> None:
    config = RolloutConfig(max_lookahead_versions=1, max_trajectory_age_steps=2, warmup_generation_lead_steps=5)
    assert VersionWindow.of(config, 7) == VersionWindow(1, 2, 7, 5)
    with pytest.raises(
        ConfigError, match=r"^warmup_generation_lead_steps=5 has no effect without critic warm-up; [^\n]*$"
    ):
        VersionWindow.of(config, 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1, 0), "max_lookahead_versions=-1"),
        ((0, -1), "max_trajectory_age_steps=-1"),
        ((2, 1), "max_lookahead_versions=2 is above max_trajectory_age_steps=1"),
        ((0, 1, -1), "critic_warmup_steps=-1"),
        ((0, 2, 1, 1), "warmup_generation_lead_steps=1 is below max_trajectory_age_steps=2; set >= 2"),
        ((0, 0, 1, -1), "warmup_generation_lead_steps=-1"),
    ],
)
def test_windows_that_cannot_be(numbers: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VersionWindow(*numbers)
