import pytest

from lightning_ppo.errors import CheckpointError, ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.samplers import (
    InOrderSampler,
    ReadyFirstSampler,
    Sampler,
    WeightFifoSampler,
    WindowedSampler,
    make_sampler,
)
from lightning_ppo.rollout.windows import VersionWindow

GATED = [InOrderSampler, ReadyFirstSampler, WeightFifoSampler]
KINDS = [*GATED, WindowedSampler]
UNSTAMPED = [ReadyFirstSampler, WeightFifoSampler]


def ahead(lookahead: int) -> VersionWindow:
    """Run `lookahead` steps ahead, and no older than that."""
    return VersionWindow(lookahead, lookahead)


def admitted(sampler: Sampler, version: int) -> list[int | None]:
    """Everything the gate lets through at this version."""
    found = []
    while (admission := sampler.admit(version)) is not None:
        found.append(admission.target_step)
        assert len(found) < 1000
    return found


def test_warm_up_reaches_the_gate() -> None:
    config = RolloutConfig(
        num_prompts_per_step=2,
        min_groups_for_streaming_train=2,
        max_lookahead_versions=1,
        warmup_generation_lead_steps=4,
    )
    sampler = make_sampler(config, warmup_steps=4)
    # W = 4, A = 1, L = 4: leads 4, 4, 3, 2, 1, 1, 1
    assert [len(admitted(sampler, version)) // 2 for version in range(7)] == [5, 1, 0, 0, 0, 1, 1]
    assert sampler.required_capacity(2) == 10
    with pytest.raises(ConfigError, match="warmup_generation_lead_steps=4 has no effect without critic warm-up"):
        make_sampler(config)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_in_order_stamps_every_batch_with_its_step(lookahead: int) -> None:
    sampler = InOrderSampler(3, ahead(lookahead))
    stamps = []
    for version in range(4):
        new = admitted(sampler, version)
        assert len(new) == 3 * (lookahead + 1 if version == 0 else 1), "one more batch per version"
        stamps += new
    assert stamps == [step for step in range(4 + lookahead) for _ in range(3)]


# Pitfall 73: how old a batch may be when it is trained, for a trainer that is always as slow as allowed.
@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(
    ("lookahead", "start_versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])]
)
def test_start_version_of_the_batch_that_each_step_trains(
    kind: type, lookahead: int, start_versions: list[int]
) -> None:
    sampler = kind(2, ahead(lookahead))
    starts = [version for version in range(5) for _ in admitted(sampler, version)][: 2 * 5]
    assert starts[::2] == starts[1::2] == start_versions
    assert all(step - start <= lookahead for step, start in enumerate(start_versions))


# Pitfall 74.
@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_resume_admits_one_window_before_it_blocks(kind: type, lookahead: int) -> None:
    sampler = kind(2, ahead(lookahead))
    sampler.seed_dispatch(50, 50)
    new = admitted(sampler, 50)
    assert len(new) == 2 * (lookahead + 1)
    if kind is InOrderSampler:
        assert new == [50 + i for i in range(lookahead + 1) for _ in range(2)]
    assert len(admitted(sampler, 51)) == 2
    assert admitted(sampler, 51) == []


@pytest.mark.parametrize("kind", GATED)
def test_resume_in_warm_up_goes_on_with_its_lead(kind: type) -> None:
    sampler = kind(2, VersionWindow(1, 1, 4, 4))
    sampler.seed_dispatch(3, 3)
    assert [len(admitted(sampler, version)) // 2 for version in range(3, 7)] == [3, 0, 1, 1]


def test_step_and_version_need_not_be_equal() -> None:
    sampler = InOrderSampler(1, ahead(1))
    sampler.seed_dispatch(7, 3)
    assert admitted(sampler, 3) == [7, 8]
    assert admitted(sampler, 4) == [9]


@pytest.mark.parametrize("kind", GATED)
def test_seeding_a_fresh_start_changes_nothing(kind: type) -> None:
    seeded, fresh = kind(2, ahead(1)), kind(2, ahead(1))
    seeded.seed_dispatch(0, 0)
    assert admitted(seeded, 0) == admitted(fresh, 0)
    assert admitted(seeded, 1) == admitted(fresh, 1)


@pytest.mark.parametrize(
    ("restored", "new"),
    [
        ([5, 5, 5], [6, 6, 6, 7, 7, 7]),
        ([5, 5, 6], [5, 6, 6, 7, 7, 7]),
        ([7, 6, 7, 6], [5, 5, 5, 6, 7]),
        # those of steps that are over are evicted, and do not count; those of later steps count later
        ([4, 4, 8, 5], [5, 5, 6, 6, 6, 7, 7, 7]),
        ([5, 6, 7] * 3, []),
    ],
)
def test_half_full_steps_are_topped_up_with_what_is_missing(restored: list[int], new: list[int]) -> None:
    sampler = InOrderSampler(3, ahead(2))
    sampler.seed_dispatch(5, 5, restored)
    assert admitted(sampler, 5) == new
    assert admitted(sampler, 6) == [8] * (3 - restored.count(8))
    assert admitted(sampler, 7) == [9] * 3


@pytest.mark.parametrize("kind", UNSTAMPED)
@pytest.mark.parametrize(("restored", "new"), [(0, 9), (1, 8), (3, 6), (5, 4), (9, 0)])
def test_restored_groups_count_as_admitted_where_nothing_is_stamped(kind: type, restored: int, new: int) -> None:
    sampler = kind(3, ahead(2))
    sampler.seed_dispatch(5, 5, [None] * restored)
    assert admitted(sampler, 5) == [None] * new
    assert admitted(sampler, 6) == [None] * 3


@pytest.mark.parametrize("kind", UNSTAMPED)
def test_more_restored_than_one_window_keeps_the_gate_shut(kind: type) -> None:
    sampler = kind(2, ahead(0))
    sampler.seed_dispatch(5, 5, [None] * 5)
    assert [len(admitted(sampler, version)) for version in (5, 6, 7, 8)] == [0, 0, 1, 2]


def test_restored_slots_that_in_order_cannot_train() -> None:
    sampler = InOrderSampler(2, ahead(1))
    with pytest.raises(CheckpointError, match="no target step; resume with the sampler of the checkpoint"):
        sampler.seed_dispatch(0, 0, [0, None])
    with pytest.raises(CheckpointError, match="3 restored rollouts are stamped for PPO step 1, num_prompts_per_step=2"):
        sampler.seed_dispatch(0, 0, [1, 1, 1])
    sampler.seed_dispatch(2, 2, [1, 1, 1])
    assert admitted(sampler, 2) == [2, 2, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "version"), [(-1, 0), (0, -1)])
def test_negative_resume_is_rejected(kind: type, step: int, version: int) -> None:
    with pytest.raises(ConfigError, match="=-1 is not a valid count"):
        kind(2, ahead(0)).seed_dispatch(step, version)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_sizes_are_rejected(kind: type) -> None:
    with pytest.raises(ConfigError, match="max_lookahead_versions=-1"):
        kind(2, ahead(-1))
    with pytest.raises(ConfigError, match="num_prompts_per_step=0"):
        kind(0, ahead(0))


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(("lookahead", "capacity"), [(0, 8), (1, 16), (3, 32)])
def test_required_capacity_is_the_live_batch_plus_those_ahead(kind: type, lookahead: int, capacity: int) -> None:
    sampler = kind(8, ahead(lookahead))
    assert sampler.required_capacity(8) == capacity
    assert sampler.is_on_policy is (lookahead == 0)


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(
    ("window", "capacity", "on_policy"),
    [
        (VersionWindow(0, 1, 4, 4), 40, False),
        (VersionWindow(0, 0, 4, 4), 40, True),
        # no step ever sees more than W + A ahead
        (VersionWindow(1, 1, 2, 9), 32, False),
        (VersionWindow(0, 1, 4, None), 8, True),
    ],
)
def test_required_capacity_is_that_of_the_peak(
    kind: type, window: VersionWindow, capacity: int, on_policy: bool
) -> None:
    assert kind(8, window).required_capacity(8) == capacity
    assert kind(8, window).is_on_policy is on_policy


@pytest.mark.parametrize("kind", GATED)
def test_gated_samplers_never_abort(kind: type) -> None:
    assert not any(kind(2, ahead(1)).aborts_inflight(start, 9) for start in range(10))


def test_ready_first_opens_one_more_batch_per_version() -> None:
    sampler = ReadyFirstSampler(2, ahead(1))
    assert admitted(sampler, 0) == [None] * 4
    assert sampler.admit(0) is None
    assert admitted(sampler, 1) == [None] * 2


def test_weight_fifo_blocks_at_its_lookahead_and_stamps_nothing() -> None:
    sampler = WeightFifoSampler(2, VersionWindow(1, 3))
    assert admitted(sampler, 0) == [None] * 4
    assert admitted(sampler, 1) == [None] * 2
