"""Random runs of sampler, buffer and selection without an event loop: what they promise together."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import ReadyFirstSampler, WindowedSampler, make_sampler
from lightning_ppo.rollout.selection import Selection
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import make_prompt, make_trajectory

ROWS = {}


def row(version: int):
    return ROWS.setdefault(version, make_trajectory(version=version))


# Pitfall 76.
@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "weight_fifo", "windowed"])
def test_staleness_zero_trains(sampler: str) -> None:
    config = RolloutConfig(
        num_prompts_per_step=3, min_groups_for_streaming_train=1, sampler=sampler, max_trajectory_age_steps=0
    )
    assert config.inflight_capacity >= 3
    run = Run(config, 0, random.Random(0))
    run.drain(steps=4)
    assert run.step == 4
    assert set(run.ages) == {0}


class Run:
    """A rollout pump and a trainer, one move at a time; every move that a real run can make, in any order."""

    def __init__(self, config: RolloutConfig, warmup: int, rng: random.Random) -> None:
        self.config = config
        self.window = VersionWindow.of(config, warmup)
        self.sampler = make_sampler(config, warmup)
        self.buffer = ReplayBuffer(config.buffer_capacity, 1)
        self.selection = Selection(self.buffer, self.sampler, config, 1, None)
        self.rng = rng
        self.step = 0
        self.remaining = config.num_prompts_per_step
        self.next_draw = 0
        self.given_back: list[int] = []
        self.admission = None
        self.kept: dict[int, int] = {}
        self.trained: list[int] = []
        self.skipped: list[int] = []
        self.ages: list[int] = []
        self.seen = dict.fromkeys(("too old", "evicted", "given back", "skipped", "at the bound"), 0)

    def dispatch(self) -> bool:
        self.admission = self.admission or self.sampler.admit(self.step)
        if self.admission is None or not self.buffer.has_room:
            return False
        self.reserve(self.admission.target_step)
        self.admission = None
        return True

    def reserve(self, target: int | None) -> None:
        if self.given_back:
            draw = self.given_back.pop(0)
        else:
            draw, self.next_draw = self.next_draw, self.next_draw + 1
        self.buffer.reserve(draw, make_prompt(), self.step, target)

    def commit(self) -> bool:
        pending = self.buffer.pending()
        if not pending:
            return False
        slot = self.rng.choice(pending)
        # tokens of any version since the start; a sibling that was kept from an earlier attempt may be older
        version = self.kept.pop(slot.draw, self.rng.randint(slot.start_version, self.step))
        self.buffer.commit(slot.group_id, [row(version)], self.step)
        return True

    def fill(self) -> bool:
        return sum(self.dispatch() for _ in range(self.config.buffer_capacity)) > 0

    def flush(self) -> bool:
        return sum(self.commit() for _ in range(len(self.buffer.pending()))) > 0

    def advance(self) -> bool:
        """All but one group are finished, and as many are trained as that allows."""
        self.fill()
        while len(self.buffer.pending()) > 1:
            self.commit()
        return self.pick()

    def restart(self) -> bool:
        """An attempt failed or was aborted; its finished siblings are kept, or not."""
        pending = self.buffer.pending()
        if not pending:
            return False
        slot = self.rng.choice(pending)
        if self.rng.random() < 0.5:
            self.kept.setdefault(slot.draw, slot.start_version)
        self.buffer.regenerate(slot.draw, self.step)
        return True

    def replace(self) -> bool:
        """A prompt is dropped, and the next one takes its place."""
        pending = self.buffer.pending()
        if not pending:
            return False
        slot = self.rng.choice(pending)
        self.buffer.remove(slot.group_id)
        self.skipped.append(slot.draw)
        self.seen["skipped"] += 1
        self.kept.pop(slot.draw, None)
        self.reserve(slot.target_step)
        return True

    def pick(self) -> bool:
        """Sweep and select, as the trainer does under the buffer's lock."""
        for group in self.sampler.evict(self.buffer, self.step, self.step):
            if group.target_step is None:
                self.buffer.regenerate(group.draw, self.step)
                self.seen["evicted"] += 1
            else:
                self.buffer.give_back([group.draw])
                self.given_back.append(group.draw)
                self.seen["given back"] += 1
        for group in self.buffer.stale(self.window.oldest_allowed(self.step)):
            self.buffer.regenerate(group.draw, self.step)
            self.seen["too old"] += 1
        groups = self.selection.pick(self.step, self.remaining, self.step)
        self.buffer.claim(groups)
        self.remaining -= len(groups)
        for group in groups:
            versions = [int(version) for version in group.trajectories[0].policy_versions]
            self.ages.append(max(self.window.policy_age(self.step, version) for version in versions))
            self.seen["at the bound"] += 0 < self.ages[-1] == self.window.max_age
        if self.remaining == 0:
            self.close()
        return bool(groups)

    def close(self) -> bool:
        """End the step, complete or, with prompts that were dropped, short; new prompts start before it is released."""
        claimed = [group.draw for group in self.buffer.claimed()]
        if not claimed:
            return False
        self.step += 1
        self.remaining = self.config.num_prompts_per_step
        for _ in range(self.rng.randrange(4)):
            self.dispatch()
        self.buffer.release(claimed)
        self.trained += claimed
        return True

    def drain(self, steps: int) -> None:
        """Train `steps` more steps with everything finished at once, in few rounds each."""
        for _ in range(steps):
            before, rounds = self.step, 0
            while self.step == before:
                self.fill()
                self.flush()
                self.pick()
                rounds += 1
                assert rounds < 20, f"deadlock in step {self.step}: {self.buffer.describe()}"

    def check(self) -> None:
        groups = (*self.buffer.pending(), *self.buffer.ready(), *self.buffer.claimed())
        in_buffer = [group.draw for group in groups]
        everywhere = in_buffer + self.given_back + self.trained + self.skipped
        assert sorted(everywhere) == list(range(self.next_draw)), "a draw was lost, or is in two places"
        assert self.buffer.occupied == len(in_buffer) <= self.config.buffer_capacity
        assert max(self.ages, default=0) <= self.config.max_trajectory_age_steps


@st.composite
def configs(draw) -> tuple[RolloutConfig, int]:
    size = draw(st.integers(1, 4))
    warmup = draw(st.integers(0, 3))
    age = draw(st.integers(0, 2))
    lookahead = draw(st.integers(0, age))
    lead = draw(st.none() | st.integers(age, 4)) if warmup else None
    sampler = draw(st.sampled_from(["in_order", "ready_first", "weight_fifo", "windowed"]))
    peak = max(lookahead, lead or 0)
    config = RolloutConfig(
        num_prompts_per_step=size,
        min_groups_for_streaming_train=draw(st.integers(1, size)),
        sampler=sampler,
        sample_freshest_first=sampler == "windowed" and draw(st.booleans()),
        max_lookahead_versions=lookahead,
        max_trajectory_age_steps=age,
        warmup_generation_lead_steps=lead,
        max_buffered_rollouts=draw(st.integers(size * (peak + 1), size * (peak + 3))),
    )
    return config, warmup


MOVES = ["dispatch", "fill", "commit", "flush", "pick", "advance", "advance", "restart", "replace", "close"]


@settings(max_examples=250, deadline=None)
@given(configs(), st.lists(st.sampled_from(MOVES), min_size=20, max_size=60), st.integers(0, 2**32))
def test_nothing_is_lost_trained_twice_or_too_old_in_any_schedule(
    setup: tuple[RolloutConfig, int], moves: list[str], seed: int
) -> None:
    run = Run(*setup, random.Random(seed))
    for move in moves:
        getattr(run, move)()
        run.check()
    run.drain(steps=3)
    run.check()


def test_random_schedules_reach_the_cases_that_matter() -> None:
    """Without groups that are generated again, given back and skipped the property above would say little."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        rng = random.Random(seed)
        config = RolloutConfig(
            num_prompts_per_step=3,
            min_groups_for_streaming_train=1,
            sampler=["in_order", "ready_first", "weight_fifo", "windowed"][seed % 4],
            max_lookahead_versions=1,
        )
        run = Run(config, 0, rng)
        for _ in range(60):
            getattr(run, rng.choice(MOVES))()
        seen.update(run.seen)
    assert len(seen) == 5
    assert min(seen.values()) > 10, seen


def test_a_straggler_of_ready_first_is_too_old_unless_it_is_generated_again() -> None:
    window = VersionWindow(1, 1)
    sampler, buffer = ReadyFirstSampler(1, window), ReplayBuffer(4, 1)
    buffer.commit(buffer.reserve(0, make_prompt(), 0, None).group_id, [row(0)], 0)
    assert not buffer.stale(window.oldest_allowed(1))
    assert [group.draw for group in sampler.select(buffer, 2, 2, 1)] == [0], "the sampler would take it"
    assert window.policy_age(2, 0) == 2
    assert [group.draw for group in buffer.stale(window.oldest_allowed(2))] == [0]


def test_windowed_refills_what_it_evicts() -> None:
    """Capacity alone limits it: groups that it left behind grow old, and are generated again in their slots."""
    window = VersionWindow(0, 0)
    sampler, buffer = WindowedSampler(2, window), ReplayBuffer(4, 1)
    for draw in range(4):
        assert sampler.admit(0) is not None
        buffer.commit(buffer.reserve(draw, make_prompt(), 0, None).group_id, [row(0)], 0)
    first = sampler.select(buffer, 0, 0, 2)
    buffer.claim(first)
    old = sampler.evict(buffer, 1, 1)
    assert [group.draw for group in old] == [2, 3]
    for group in old:
        buffer.commit(buffer.regenerate(group.draw, 1).group_id, [row(1)], 1)
    assert [group.draw for group in sampler.select(buffer, 1, 1, 2)] == [2, 3]
