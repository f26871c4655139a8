"""Totals of a step: sums over rows, chunks and ranks, divided once."""

import dataclasses

import pytest
import torch

from lightning_ppo.batch import Chunk
from lightning_ppo.ranks import Ranks
from lightning_ppo.updates.step_state import StepState


def _rows(kit):
    rows = []
    for index, row in enumerate(kit.random_rows(6, seed=81, masked=(3,))):
        t = dataclasses.replace(
            row.trajectory,
            policy_versions=torch.full_like(row.trajectory.policy_versions, 5 - index % 3),
            finish_reason="length" if index == 4 else "stop",
        )
        rows.append(dataclasses.replace(row, trajectory=t))
    return tuple(rows)


def _state(rows, *draws):
    state = StepState(ppo_step=4, policy_version=5, policy_is_trainable=True, critic_warmup_steps=0)
    for index, draw in enumerate(draws):
        share = rows[index :: len(draws)]
        chunk = Chunk(4, index, tuple(r.trajectory for r in share), draw, 1, 2, wait_s=0.0, generation_s=(2.0 - index,))
        state.add(chunk, share)
    return state


def test_totals_of_one_rank(kit):
    rows = _rows(kit)
    state = _state(rows, (7, 8), (9,))
    assert state.chunks == [(7, 8), (9,)]
    assert state.generation_s == 2.0
    totals = state.totals(Ranks.single())
    lengths = [len(row.mask) for row in rows]
    lags = [index % 3 for index in range(6)]
    assert totals.tokens == sum(int(row.mask.sum()) for row in rows)
    assert (totals.rows, totals.sequences, totals.truncated) == (6, 5, 1)
    assert totals.version_age_max == totals.policy_age_max == 2
    assert totals.version_age_sum == sum(lag * length for lag, length in zip(lags, lengths, strict=True))
    assert totals.policy_age_sum == totals.version_age_sum
    assert totals.trajectory_age_sum == sum(lags)
    metrics = totals.metrics()
    rewards = torch.tensor([row.trajectory.reward for row in rows], dtype=torch.float64)
    assert metrics["rollout/reward_mean"] == pytest.approx(float(rewards.mean()))
    assert metrics["rollout/reward_std"] == pytest.approx(float(rewards.std(correction=0)))
    assert metrics["rollout/response_length"] == pytest.approx(sum(lengths) / 6)
    assert metrics["rollout/masked_fraction"] == pytest.approx(1 - totals.tokens / sum(lengths))
    valid = {name: torch.cat([getattr(r, name)[r.mask] for r in rows]) for name in ("values", "returns")}
    error = (valid["returns"] - valid["values"]).var(correction=0) / valid["returns"].var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - float(error))


def _with_versions(row, *versions):
    """The row with a response of as many tokens as versions, all trained."""
    count = len(versions)
    t = dataclasses.replace(
        row.trajectory,
        response_ids=torch.full((count,), 3),
        response_mask=torch.ones(count, dtype=torch.bool),
        rollout_logprobs=torch.zeros(count),
        policy_versions=torch.tensor(versions),
    )
    fields = {name: torch.zeros(count) for name in ("values", "advantages", "returns")}
    return dataclasses.replace(row, trajectory=t, mask=t.response_mask, **fields)


@pytest.mark.parametrize(
    ("version", "warmup", "policy_ages"),
    [
        (5, 0, [0, 1, 1, 3, 3, 3]),
        # versions 0 to 3 have the same weights: what 2 sampled is as good as what 3 did
        (5, 3, [0, 1, 1, 2, 2, 2]),
        (5, 5, [0] * 6),
        (5, 9, [0] * 6),
    ],
)
def test_ages(kit, version, warmup, policy_ages):
    """Versions 4, 4, 5 in one row (weights changed in mid-sequence), 2 in another: 3.2 of the reference, A = 3."""
    first, second = kit.random_rows(2, seed=83)
    state = StepState(4, version, policy_is_trainable=True, critic_warmup_steps=warmup)
    rows = (_with_versions(first, 4, 4, 5), _with_versions(second, 2, 2, 2))
    state.add(Chunk(4, 0, tuple(r.trajectory for r in rows), (0, 1), 2, 2, wait_s=0.0, generation_s=(1.0, 1.0)), rows)
    metrics = state.totals(Ranks.single()).metrics()
    assert metrics["rollout/version_age_mean"] == pytest.approx((0 + 1 + 1 + 3 + 3 + 3) / 6)
    assert metrics["rollout/version_age_max"] == 3
    assert metrics["rollout/policy_age_mean"] == pytest.approx(sum(policy_ages) / 6)
    assert metrics["rollout/policy_age_max"] == max(policy_ages)
    assert metrics["rollout/trajectory_age_mean"] == pytest.approx((1 + 3) / 2)


def test_banked_rollouts_of_the_warm_up_table(kit):
    """W = 4, A = 1, lead 4: rollouts of version 0 at their last step, 4, and of version 4 at step 5 (the frontier)."""
    (row,) = kit.random_rows(1, seed=84)
    for version, sampled, version_age, policy_age in ((4, 0, 4, 0), (5, 1, 4, 1), (5, 4, 1, 1), (3, 0, 3, 0)):
        state = StepState(version, version, policy_is_trainable=True, critic_warmup_steps=4)
        rows = (_with_versions(row, sampled),)
        state.add(Chunk(version, 0, (rows[0].trajectory,), (0,), 1, 1, wait_s=0.0, generation_s=(1.0,)), rows)
        metrics = state.totals(Ranks.single()).metrics()
        assert (metrics["rollout/version_age_max"], metrics["rollout/policy_age_max"]) == (version_age, policy_age)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_unequal_shares_are_pooled(kit, first):
    """RLinf 1386, trl 6380: never a mean of the ranks' means; a rank may have no rows."""
    rows = _rows(kit)

    def flat(totals):
        numbers = dataclasses.asdict(totals)
        return numbers | {f"rewards_{name}": number for name, number in numbers.pop("rewards").items()}

    def work(ranks):
        share = rows[:first] if ranks.rank == 0 else rows[first:]
        return flat(_state(share, (1,)).totals(ranks))

    wanted = flat(_state(rows, (1,)).totals(Ranks.single()))

    for totals in kit.on_ranks(2, work):
        assert totals == pytest.approx(wanted, rel=1e-12)


def test_the_spread_of_large_rewards_does_not_cancel(kit):
    rows = tuple(
        dataclasses.replace(row, trajectory=dataclasses.replace(row.trajectory, reward=1e8 + index % 2))
        for index, row in enumerate(kit.random_rows(6, seed=86))
    )
    for totals in kit.on_ranks(2, lambda ranks: _state(rows[ranks.rank :: 2], (1,)).totals(ranks)):
        assert totals.metrics()["rollout/reward_std"] == pytest.approx(0.5)
        assert totals.metrics()["rollout/reward_mean"] == 1e8 + 0.5


def test_all_masked(kit):
    """verl 5899: metrics of nothing are no reason to crash; the step fails elsewhere, with its reason."""
    rows = kit.random_rows(3, seed=82, masked=(0, 1, 2))
    totals = _state(rows, (1,)).totals(Ranks.single())
    assert (totals.tokens, totals.sequences) == (0, 0)
    assert totals.metrics()["rollout/masked_fraction"] == 1.0
