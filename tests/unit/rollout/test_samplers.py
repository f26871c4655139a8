import pytest

from lightning_ppo.errors import CheckpointError, ConfigError
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


def buffer_of(*slots: tuple[int, int | None, bool]) -> ReplayBuffer:
    """Slots of (start version, target step, ready)."""
    buffer = ReplayBuffer(capacity=100, group_size=1)
    for draw, (version, target, is_ready) in enumerate(slots):
        group_id = buffer.reserve(draw, make_prompt(row=draw), version, target)
        if is_ready:
            buffer.commit(group_id, [make_trajectory()], version)
    return buffer


def draws(sampler: Sampler, buffer: ReplayBuffer, version: int, step: int, limit: int = 99) -> list[int]:
    return [group.draw for group in sampler.select(buffer, version, step, limit)]


def evicted(sampler: Sampler, buffer: ReplayBuffer, version: int, step: int) -> list[int]:
    return [group.draw for group in sampler.evict(buffer, version, step)]


@pytest.mark.parametrize(
    ("name", "kind", "stamps", "deterministic"),
    [
        ("in_order", InOrderSampler, True, True),
        ("ready_first", ReadyFirstSampler, False, False),
        ("weight_fifo", WeightFifoSampler, False, False),
        ("windowed", WindowedSampler, False, False),
    ],
)
def test_config_names_the_sampler(name: str, kind: type, stamps: bool, deterministic: bool) -> None:
    config = RolloutConfig(
        num_prompts_per_step=2, min_groups_for_streaming_train=1, sampler=name, max_lookahead_versions=1
    )
    sampler = make_sampler(config)
    assert type(sampler) is kind
    assert isinstance(sampler, Sampler)
    assert sampler.capabilities.stamps_targets is stamps is (sampler.admit(0).target_step is not None)
    assert sampler.capabilities.is_deterministic_order is deterministic
    assert sampler.capabilities.supports_streaming
    assert sampler.capabilities.supports_restore
    if kind is not WindowedSampler:
        assert 1 + len(admitted(sampler, 0)) == 4


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


def test_ready_first_opens_one_more_batch_per_version() -> None:
    sampler = ReadyFirstSampler(2, ahead(1))
    assert admitted(sampler, 0) == [None] * 4
    assert sampler.admit(0) is None
    assert admitted(sampler, 1) == [None] * 2


def test_weight_fifo_blocks_at_its_lookahead_and_stamps_nothing() -> None:
    sampler = WeightFifoSampler(2, VersionWindow(1, 3))
    assert admitted(sampler, 0) == [None] * 4
    assert admitted(sampler, 1) == [None] * 2


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


class Counted(int):
    """A whole number that counts its comparisons."""

    seen = 0

    def _counting(name: str):
        def compare(self, other: int) -> bool:
            Counted.seen += 1
            return getattr(int, name)(self, other)

        return compare

    __lt__, __le__, __gt__ = _counting("__lt__"), _counting("__le__"), _counting("__gt__")
    __ge__, __eq__ = _counting("__ge__"), _counting("__eq__")
    __hash__ = int.__hash__


def comparisons(kind: type, groups: int) -> dict[str, int]:
    """Comparisons that each operation takes with this many buffered groups, a tenth of them being generated."""
    sampler = kind(4, VersionWindow(2, 2))
    stamped = sampler.capabilities.stamps_targets
    buffer = ReplayBuffer(capacity=groups + 1, group_size=1)
    rows = {version: [make_trajectory(version=version)] for version in (1, 5, 6)}
    for draw in map(Counted, range(groups)):
        # the first eight are too old, and their step is over
        version = 1 if draw < 8 else 5 + draw % 2
        group_id = buffer.reserve(draw, make_prompt(), Counted(version), Counted(draw // 4) if stamped else None)
        if draw % 10:
            buffer.commit(group_id, rows[version], version)
    chosen: list = []
    operations = {
        "admit": lambda: sampler.admit(6),
        "reserve": lambda: buffer.reserve(Counted(groups), make_prompt(), Counted(6), None),
        "commit": lambda: buffer.commit(f"draw{groups}", rows[6], 6),
        "select": lambda: chosen.extend(sampler.select(buffer, 6, 12, 3)),
        "evict": lambda: sampler.evict(buffer, 6, 2),
        "stale": lambda: buffer.stale(4),
        "regenerate": lambda: buffer.regenerate(Counted(groups - 1), Counted(6)),
        "claim": lambda: buffer.claim(chosen),
        "release": lambda: buffer.release([group.draw for group in chosen]),
        "give_back": lambda: buffer.give_back([Counted(101)]),
    }
    counts = {}
    for name, operation in operations.items():
        Counted.seen = 0
        operation()
        counts[name] = Counted.seen
    assert len(chosen) == 3
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_walks_through_the_buffer(kind: type) -> None:
    few, many = comparisons(kind, 120), comparisons(kind, 12_000)
    assert sum(few.values()) > 50
    for name, count in many.items():
        # a hundred times as many groups: a factor of log(12 000) / log(120) = 2
        assert count <= 3 * few[name] + 10, name
