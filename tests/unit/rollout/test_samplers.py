import pytest

from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import (
    InOrderSampler,
    ReadyFirstSampler,
    Sampler,
    WeightFifoSampler,
    WindowedSampler,
    make_sampler,
)
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import make_prompt, make_trajectory


def ahead(lookahead: int) -> VersionWindow:
    """Run `lookahead` steps ahead, and no older than that."""
    return VersionWindow(lookahead, lookahead)


def buffer_of(*slots: tuple[int, int | None, bool]) -> ReplayBuffer:
    """Slots of (start version, target step, ready)."""
    buffer = ReplayBuffer(capacity=100, group_size=1)
    for draw, (version, target, is_ready) in enumerate(slots):
        group_id = buffer.reserve(draw, make_prompt(row=draw), version, target).group_id
        if is_ready:
            buffer.commit(group_id, [make_trajectory()], version)
    return buffer


def draws(sampler: Sampler, buffer: ReplayBuffer, version: int, step: int, limit: int = 99) -> list[int]:
    return [group.draw for group in sampler.select(buffer, version, step, limit)]


def evicted(sampler: Sampler, buffer: ReplayBuffer, version: int, step: int) -> list[int]:
    return [group.draw for group in sampler.evict(buffer, version, step)]


@pytest.mark.parametrize(
    ("name", "kind", "stamps"),
    [
        ("in_order", InOrderSampler, True),
        ("ready_first", ReadyFirstSampler, False),
        ("weight_fifo", WeightFifoSampler, False),
        ("windowed", WindowedSampler, False),
    ],
)
def test_config_names_the_sampler(name: str, kind: type, stamps: bool) -> None:
    config = RolloutConfig(
        num_prompts_per_step=2, min_groups_for_streaming_train=1, sampler=name, max_lookahead_versions=1
    )
    sampler = make_sampler(config)
    assert type(sampler) is kind
    assert isinstance(sampler, Sampler)
    assert sampler.capabilities.stamps_targets is stamps is (sampler.admit(0).target_step is not None)
    assert sampler.capabilities.supports_streaming
    assert sampler.capabilities.supports_restore


# Pitfall 73: the bound itself.
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_which_start_versions_may_be_trained_at_which_version(bound: int) -> None:
    table = {(start, train): start <= train and train - start <= bound for start in range(5) for train in range(5)}
    for (start, train), allowed in table.items():
        buffer = buffer_of((start, None, True))
        sampler = WindowedSampler(1, ahead(bound))
        assert draws(sampler, buffer, train, train) == [0] * allowed
        assert draws(WeightFifoSampler(1, ahead(bound)), buffer, train, train) == [0] * allowed
        if start <= train:
            assert evicted(sampler, buffer, train, train) == [0] * (not allowed)
            # made with version 0 tokens: the oldest token counts
            stale = [group.draw for group in buffer.stale(ahead(bound).oldest_allowed(train))]
            assert stale == [0] * (train > bound)


def test_in_order_selects_by_stamp_only() -> None:
    buffer = buffer_of((0, 2, True), (0, 3, True), (2, 2, False), (2, 2, True), (1, 1, True))
    assert draws(InOrderSampler(2, ahead(2)), buffer, 2, 2) == [0, 3]
    assert draws(InOrderSampler(2, ahead(2)), buffer, 2, 2, limit=1) == [0]
    assert draws(InOrderSampler(2, ahead(2)), buffer, 3, 3) == [1]
    assert len(buffer.ready()) == 4, "selecting changes nothing"


def test_in_order_evicts_what_came_too_late_and_nothing_that_is_still_to_come() -> None:
    sampler = InOrderSampler(2, ahead(1))
    buffer = buffer_of((0, 9, True), (8, 7, True), (8, 7, False), (8, 8, True))
    assert evicted(sampler, buffer, 8, 8) == [1]
    assert evicted(sampler, buffer, 9, 9) == [1, 3]
    assert draws(sampler, buffer, 9, 9) == [0], "however old it is: staleness is not the sampler's business"


def test_ready_first_mixes_versions_in_buffer_order_and_keeps_stragglers() -> None:
    buffer = buffer_of((0, None, True), (1, None, False), (1, None, True), (3, None, True), (9, None, True))
    sampler = ReadyFirstSampler(2, ahead(1))
    assert draws(sampler, buffer, 3, 0) == [0, 2, 3]
    assert draws(sampler, buffer, 3, 0, limit=2) == [0, 2]
    assert evicted(sampler, buffer, 99, 99) == []
    assert draws(sampler, buffer, 99, 99) == [0, 2, 3, 4]


def test_weight_fifo_waits_for_the_oldest_version_in_its_window() -> None:
    buffer = buffer_of((2, None, True), (3, None, True), (3, None, False), (4, None, True))
    sampler = WeightFifoSampler(2, VersionWindow(1, 1))
    assert draws(sampler, buffer, 4, 4) == [1], "3 is the oldest in the window; 4 waits, 2 is too old"
    buffer.claim([buffer.index.find_ready(1)])
    assert draws(sampler, buffer, 4, 4) == [], "draw 2 is still being generated, what is claimed does not count"
    buffer.commit("draw2", [make_trajectory()], 4)
    assert draws(sampler, buffer, 4, 4) == [2, 3], "all of 3 is finished: 4 follows"
    assert draws(sampler, buffer, 4, 4, limit=1) == [2]
    assert draws(sampler, buffer, 9, 9) == [], "an empty window"
    assert evicted(sampler, buffer, 4, 4) == [0]
    buffer.regenerate(2, 4)
    assert draws(sampler, buffer, 4, 4) == [3], "generated again, it belongs to the new version"


def test_weight_fifo_waits_for_a_version_of_which_nothing_is_ready() -> None:
    buffer = buffer_of((3, None, False), (4, None, True))
    assert draws(WeightFifoSampler(2, VersionWindow(1, 1)), buffer, 4, 4) == []
    assert draws(WeightFifoSampler(2, VersionWindow(0, 0)), buffer, 4, 4) == [1]


def test_weight_fifo_never_ends_up_with_a_version_smaller_than_a_step() -> None:
    """Three groups of version 0 and one of version 1 are a step of four, however the dispatch was delayed."""
    buffer = buffer_of((0, None, True), (0, None, True), (0, None, True), (1, None, True))
    assert draws(WeightFifoSampler(4, ahead(1)), buffer, 1, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("freshest", [False, True])
def test_windowed_never_blocks_and_stamps_nothing(freshest: bool) -> None:
    sampler = WindowedSampler(2, ahead(0), freshest)
    assert [sampler.admit(0).target_step for _ in range(99)] == [None] * 99
    sampler.seed_dispatch(9, 9, [None, 4])
    assert sampler.admit(9) is not None
    assert sampler.required_capacity(2) == 2
    assert sampler.is_on_policy
    assert not WindowedSampler(2, VersionWindow(0, 1)).is_on_policy


def test_windowed_takes_what_started_in_the_window() -> None:
    slots = ((1, None, True), (3, None, True), (2, None, True), (2, None, False), (4, None, True), (2, None, True))
    buffer = buffer_of(*slots, (5, None, True))
    by_draw, freshest = WindowedSampler(2, VersionWindow(0, 2)), WindowedSampler(2, VersionWindow(0, 2), True)
    assert draws(by_draw, buffer, 4, 4) == [1, 2, 4, 5]
    assert draws(by_draw, buffer, 4, 4, limit=2) == [1, 2]
    assert draws(freshest, buffer, 4, 4) == [4, 1, 2, 5], "by lag, then by draw"
    assert draws(freshest, buffer, 4, 4, limit=3) == [4, 1, 2]
    assert evicted(by_draw, buffer, 4, 4) == evicted(freshest, buffer, 4, 4) == [0]
    assert evicted(by_draw, buffer, 5, 5) == [0, 2, 5], "never what is still being generated"


def test_windowed_aborts_what_fell_out_of_the_window() -> None:
    sampler = WindowedSampler(2, VersionWindow(0, 2))
    assert [sampler.aborts_inflight(start, 4) for start in range(6)] == [True, True, False, False, False, False]
    warm = WindowedSampler(2, VersionWindow(0, 2, warmup_steps=3))
    assert not any(warm.aborts_inflight(start, 5) for start in range(6))


def test_freshest_first_of_the_config() -> None:
    config = RolloutConfig(sampler="windowed", sample_freshest_first=True)
    buffer = buffer_of((0, None, True), (1, None, True))
    assert draws(make_sampler(config), buffer, 1, 1) == [1, 0]
