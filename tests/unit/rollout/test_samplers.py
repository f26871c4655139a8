import pytest

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import InOrderSampler, ReadyFirstSampler, Sampler, make_sampler
from lightning_ppo.testing import make_prompt, make_trajectory

KINDS = [InOrderSampler, ReadyFirstSampler]


def admitted(sampler: Sampler, version: int) -> list[int | None]:
    """Everything the gate lets through at this version."""
    found = []
    while (admission := sampler.admit(version)) is not None:
        found.append(admission.target_step)
        assert len(found) < 1000
    return found


def buffer_of(*slots: tuple[int, int | None, bool]) -> ReplayBuffer:
    """Slots of (start version, target step, ready)."""
    buffer = ReplayBuffer(capacity=100, group_size=1)
    for draw, (version, target, is_ready) in enumerate(slots):
        group_id = buffer.reserve(draw, make_prompt(row=draw), version, target)
        if is_ready:
            buffer.commit(group_id, [make_trajectory()], version)
    return buffer


def draws(sampler: Sampler, buffer: ReplayBuffer, version: int, step: int) -> list[int]:
    return [group.draw for group in sampler.eligible(buffer, version, step)]


@pytest.mark.parametrize(("name", "kind"), [("in_order", InOrderSampler), ("ready_first", ReadyFirstSampler)])
def test_config_names_the_sampler(name: str, kind: type) -> None:
    config = RolloutConfig(
        num_prompts_per_step=2, min_groups_for_streaming_train=1, sampler=name, max_lookahead_versions=1
    )
    sampler = make_sampler(config)
    assert type(sampler) is kind
    assert isinstance(sampler, Sampler)
    assert len(admitted(sampler, 0)) == 4


@pytest.mark.parametrize("window", [0, 1, 2])
def test_in_order_stamps_every_batch_with_its_step(window: int) -> None:
    sampler = InOrderSampler(3, window)
    stamps = []
    for version in range(4):
        new = admitted(sampler, version)
        assert len(new) == 3 * (window + 1 if version == 0 else 1), "one more batch per version"
        stamps += new
    assert stamps == [step for step in range(4 + window) for _ in range(3)]


# Pitfall 73: how old a batch may be when it is trained, for a trainer that is always as slow as allowed.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("window", "start_versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])]
)
def test_start_version_of_the_batch_that_each_step_trains(kind: type, window: int, start_versions: list[int]) -> None:
    sampler = kind(2, window)
    starts = [version for version in range(5) for _ in admitted(sampler, version)][: 2 * 5]
    assert starts[::2] == starts[1::2] == start_versions
    assert all(step - start <= window for step, start in enumerate(start_versions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 3])
def test_resume_admits_one_window_before_it_blocks(kind: type, window: int) -> None:
    sampler = kind(2, window)
    sampler.seed_dispatch(50, 50)
    new = admitted(sampler, 50)
    assert len(new) == 2 * (window + 1)
    if kind is InOrderSampler:
        assert new == [50 + i for i in range(window + 1) for _ in range(2)]
    assert len(admitted(sampler, 51)) == 2


def test_seeding_a_fresh_start_changes_nothing() -> None:
    sampler = InOrderSampler(2, 1)
    sampler.seed_dispatch(0, 0)
    assert admitted(sampler, 0) == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "version"), [(-1, 0), (0, -1)])
def test_negative_resume_is_rejected(kind: type, step: int, version: int) -> None:
    with pytest.raises(ConfigError, match="=-1 is not a valid count"):
        kind(2, 0).seed_dispatch(step, version)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_sizes_are_rejected(kind: type) -> None:
    with pytest.raises(ConfigError, match="max_lookahead_versions=-1"):
        kind(2, -1)
    with pytest.raises(ConfigError, match="num_prompts_per_step=0"):
        kind(0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "capacity"), [(0, 8), (1, 16), (3, 32)])
def test_required_capacity_is_the_live_batch_plus_those_ahead(kind: type, window: int, capacity: int) -> None:
    sampler = kind(8, window)
    assert sampler.required_capacity(8) == capacity
    assert sampler.is_on_policy is (window == 0)


def test_in_order_selects_by_stamp_only() -> None:
    buffer = buffer_of((0, 2, True), (0, 3, True), (2, 2, False), (2, 2, True), (1, 1, True))
    assert draws(InOrderSampler(2, 2), buffer, 2, 2) == [0, 3]
    assert draws(InOrderSampler(2, 2), buffer, 3, 3) == [1]
    assert len(buffer.ready()) == 4, "selecting changes nothing"


def test_ready_first_mixes_versions_in_buffer_order_and_keeps_stragglers() -> None:
    buffer = buffer_of((0, None, True), (1, None, False), (1, None, True), (3, None, True), (9, None, True))
    assert draws(ReadyFirstSampler(2, 1), buffer, 3, 0) == [0, 2, 3]
