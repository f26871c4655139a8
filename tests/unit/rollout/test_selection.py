import re
from collections.abc import Callable

import pytest

from lightning_ppo.errors import ConfigError, DataError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import InOrderSampler, Sampler, SamplerCapabilities, make_sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.selection import Selection
from lightning_ppo.testing import make_group, make_prompt, make_trajectory


@pytest.fixture
def build() -> Callable[..., tuple[Selection, ReplayBuffer]]:
    def make(
        ready: int = 0,
        *,
        align: int = 1,
        schedule: ChunkSchedule | None = None,
        instance: Sampler | None = None,
        version: int = 0,
        **settings,
    ) -> tuple[Selection, ReplayBuffer]:
        defaults = {"num_prompts_per_step": 4, "min_groups_for_streaming_train": 2, "sampler": "ready_first"}
        config = RolloutConfig(**(defaults | settings))
        sampler = make_sampler(config) if instance is None else instance
        buffer = ReplayBuffer(99, 1)
        for draw in range(ready):
            buffer.restore(make_group(draw, version=version))
        return Selection(buffer, sampler, config, align, schedule), buffer

    return make


def draws(selection: Selection, step: int, remaining: int, version: int = 0) -> list[int]:
    return [group.draw for group in selection.pick(step, remaining, version)]


# Pitfall 77.
def test_ten_are_ready_four_are_needed_six_remain(build) -> None:
    selection, buffer = build(10, min_groups_for_streaming_train=4)
    chosen = selection.pick(0, 4, 0)
    assert len(buffer.ready()) == 10, "picking changes nothing"
    buffer.claim(chosen)
    assert [group.draw for group in chosen] == [0, 1, 2, 3]
    assert [group.draw for group in buffer.ready()] == [4, 5, 6, 7, 8, 9]
    assert draws(selection, 1, 4) == [4, 5, 6, 7]


def test_below_the_minimum_nothing_is_selected(build) -> None:
    selection, buffer = build(1)
    assert draws(selection, 0, 4) == []
    buffer.restore(make_group(7))
    assert draws(selection, 0, 4) == [0, 7]


@pytest.mark.parametrize("sampler", ["ready_first", "weight_fifo", "windowed"])
def test_the_tail_rule_defers_the_whole_selection(build, sampler: str) -> None:
    selection, buffer = build(7, num_prompts_per_step=8, min_groups_for_streaming_train=4, sampler=sampler)
    assert draws(selection, 0, 8) == [], "one group would be left, the floor is 2"
    buffer.restore(make_group(7))
    assert draws(selection, 0, 8) == list(range(8))
    assert draws(selection, 0, 2) == [0, 1], "the last chunk may be below the minimum"


def test_chunks_are_aligned(build) -> None:
    selection, _ = build(3, align=2)
    assert draws(selection, 0, 4) == [0, 1]


def test_the_sampler_says_which_and_the_chunk_stands_in_draw_order(build) -> None:
    selection, buffer = build(sampler="windowed", sample_freshest_first=True)
    for draw, version in enumerate([1, 0, 1, 2]):
        buffer.restore(make_group(draw, version=version))
    assert draws(selection, 1, 2, version=1) == [0, 2], "not draw 1, which is older; draw 3 is newer than the trainer"
    assert draws(selection, 2, 2, version=2) == [0, 3], "taken as 3, 0"


def test_groups_of_later_steps_are_left_alone(build) -> None:
    selection, buffer = build(sampler="in_order", max_lookahead_versions=1)
    for draw, target in enumerate([1, 1, 0, 1, 0]):
        buffer.restore(make_group(draw, target_step=target))
    assert draws(selection, 0, 4) == [2, 4]
    assert draws(selection, 1, 4) == [0, 1, 3]


def test_recorded_chunks_are_waited_for(build) -> None:
    schedule = ChunkSchedule({0: ((5, 1), (0, 2))}, "recorded")
    selection, buffer = build(5, schedule=schedule)
    assert draws(selection, 0, 4) == [], "draw 5 is not finished yet, whatever else is"
    buffer.restore(make_group(5))
    assert draws(selection, 0, 4) == [1, 5]
    assert draws(selection, 0, 2) == [0, 2]
    with pytest.raises(DataError, match="no chunk starts after 1 groups"):
        selection.check(0, 3)


def test_recorded_chunk_with_a_group_of_another_step(build) -> None:
    schedule = ChunkSchedule({0: ((0, 1, 2, 3),)}, "recorded")
    selection, buffer = build(sampler="in_order", max_lookahead_versions=1, schedule=schedule)
    for draw in range(3):
        buffer.restore(make_group(draw, target_step=0))
    assert draws(selection, 0, 4) == []
    buffer.restore(make_group(3, target_step=1))
    with pytest.raises(DataError, match=r"^recorded PPO step 0 trains draw 3, which is stamped for step 1; [^\n]*$"):
        selection.pick(0, 4, 0)


@pytest.mark.parametrize("remaining", [0, 5])
def test_impossible_remainder(build, remaining: int) -> None:
    selection, _ = build()
    with pytest.raises(ValueError, match=f"remaining={remaining} is not in 1..4"):
        selection.check(0, remaining)


class Greedy(InOrderSampler):
    capabilities = SamplerCapabilities(stamps_targets=True, supports_streaming=False, supports_restore=True)

    def required_capacity(self, groups_per_step: int) -> int:
        return 9 * groups_per_step


# Pitfall 80.
def test_a_buffer_smaller_than_the_sampler_needs(build) -> None:
    greedy = Greedy(4, make_sampler(RolloutConfig())._window)
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=8 .*would deadlock; set >= 36"):
        build(instance=greedy, min_groups_for_streaming_train=4)
    build(instance=greedy, min_groups_for_streaming_train=4, max_buffered_rollouts=36)
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=7 would deadlock; .* = 8"):
        build(max_lookahead_versions=1, max_buffered_rollouts=7)


def test_a_sampler_that_cannot_be_cut_into_chunks() -> None:
    config = RolloutConfig(
        num_prompts_per_step=4, min_groups_for_streaming_train=2, sampler="mine:Greedy", max_buffered_rollouts=36
    )
    greedy = Greedy(4, make_sampler(RolloutConfig())._window)
    message = "min_groups_for_streaming_train=2 streams, which sampler=mine:Greedy does not support; set 4"
    with pytest.raises(ConfigError, match=re.escape(message)):
        Selection(ReplayBuffer(36, 1), greedy, config, 1, None)


def test_step_that_does_not_divide(build) -> None:
    with pytest.raises(ConfigError, match="set a multiple of 3"):
        build(align=3)


def test_what_is_generated_again_is_not_selected(build) -> None:
    selection, buffer = build(4, min_groups_for_streaming_train=4, max_lookahead_versions=1)
    buffer.regenerate(2, 1)
    assert draws(selection, 0, 4, version=1) == []
    buffer.commit("draw2", [make_trajectory(version=1)], 1)
    assert draws(selection, 0, 4, version=1) == [0, 1, 2, 3]


def test_what_is_given_back_is_not_selected(build) -> None:
    selection, buffer = build(5, min_groups_for_streaming_train=4)
    buffer.give_back([0])
    assert draws(selection, 0, 4) == [1, 2, 3, 4]
    buffer.reserve(0, make_prompt(), 0, None)
    assert draws(selection, 0, 4) == [1, 2, 3, 4]
