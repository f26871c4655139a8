"""Turns on the device, read off the ledger; collectives; the stop watch."""

import pytest
import torch
from torch import nn

from lightning_ppo import timing
from lightning_ppo.ranks import Ranks
from lightning_ppo.residency import Residency
from lightning_ppo.timing import PhaseTimer


@pytest.fixture
def residency():
    residency = Residency(torch.device("cpu"))
    for name in ("policy", "critic", "reference"):
        residency.add(name, nn.Linear(2, 2))
    return residency


def test_nobody_is_there_at_first(residency):
    assert residency.resident is None
    assert residency.ledger == []
    residency.release()
    assert residency.ledger == []


def test_at_most_one_is_resident(residency):
    """NeMo RL 2782: the policy, or its optimizer, was still there when the critic was loaded."""
    for name in ("critic", "policy", "critic", "reference", "policy"):
        residency.acquire(name)
        assert residency.resident == name
    residency.release()
    there = set()
    for action, name in residency.ledger:
        there = there | {name} if action == "load" else there - {name}
        assert len(there) <= 1
    assert not there
    assert [name for action, name in residency.ledger if action == "load"] == [
        "critic", "policy", "critic", "reference", "policy",
    ]  # fmt: skip


def test_acquiring_again_is_free(residency):
    residency.acquire("critic")
    before = list(residency.ledger)
    for _ in range(3):
        residency.acquire("critic")
    assert residency.ledger == before == [("load", "critic")]


def test_nothing_moves_on_a_cpu(residency):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    addresses = [p.data_ptr() for p in model.parameters()]
    residency.add("other", model, optimizer)
    residency.acquire("other")
    residency.acquire("policy")
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_single_rank():
    ranks = Ranks.single()
    tensor = torch.tensor([1.0, 2.0])
    ranks.sum_(tensor)
    assert torch.equal(tensor, torch.tensor([1.0, 2.0]))
    assert torch.equal(ranks.stack(tensor), tensor[None])


def test_stack_collects_every_rank(kit):
    def work(ranks):
        return ranks.stack(torch.tensor([ranks.rank + 1.0, 10.0]))

    wanted = torch.tensor([[1.0, 10.0], [2.0, 10.0], [3.0, 10.0]])
    for stacked in kit.on_ranks(3, work):
        assert torch.equal(stacked, wanted)


def test_an_inner_phase_is_taken_off_the_outer_one(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 4.0, 6.0, 10.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    timer = PhaseTimer()
    with timer.phase("outer"):
        with timer.phase("inner"):
            pass
        with timer.phase("inner"):
            pass
    timer.add("wait", 5.0)
    assert timer.reset() == {"outer": 6.0, "inner": 4.0, "wait": 5.0}
    assert timer.reset() == {}


def test_a_phase_that_raises_is_counted(monkeypatch):
    now = iter([0.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="inside"), timer.phase("broken"):
        raise ValueError("inside")
    with timer.phase("next"):
        pass
    assert timer.reset() == {"broken": 2.0, "next": 1.0}
