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
    state = StepState(ppo_step=4, policy_version=5, policy_is_trainable=True)
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
    assert totals.staleness_max == 2
    assert totals.staleness_sum == sum(lag * length for lag, length in zip(lags, lengths, strict=True))
    metrics = totals.metrics()
    rewards = torch.tensor([row.trajectory.reward for row in rows], dtype=torch.float64)
    assert metrics["rollout/reward_mean"] == pytest.approx(float(rewards.mean()))
    assert metrics["rollout/reward_std"] == pytest.approx(float(rewards.std(correction=0)))
    assert metrics["rollout/response_length"] == pytest.approx(sum(lengths) / 6)
    assert metrics["rollout/masked_fraction"] == pytest.approx(1 - totals.tokens / sum(lengths))
    valid = {name: torch.cat([getattr(r, name)[r.mask] for r in rows]) for name in ("values", "returns")}
    error = (valid["returns"] - valid["values"]).var(correction=0) / valid["returns"].var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - float(error))


@pytest.mark.parametrize("first", [0, 1, 5])
def test_unequal_shares_are_pooled(kit, first):
    """RLinf 1386, trl 6380: never a mean of the ranks' means; a rank may have no rows."""
    rows = _rows(kit)
    wanted = dataclasses.asdict(_state(rows, (1,)).totals(Ranks.single()))

    def work(ranks):
        share = rows[:first] if ranks.rank == 0 else rows[first:]
        return dataclasses.asdict(_state(share, (1,)).totals(ranks))

    for totals in kit.on_ranks(2, work):
        assert totals == pytest.approx(wanted, rel=1e-12)


def test_all_masked(kit):
    """verl 5899: metrics of nothing are no reason to crash; the step fails elsewhere, with its reason."""
    rows = kit.random_rows(3, seed=82, masked=(0, 1, 2))
    totals = _state(rows, (1,)).totals(Ranks.single())
    assert (totals.tokens, totals.sequences) == (0, 0)
    assert totals.metrics()["rollout/masked_fraction"] == 1.0
