"""Partition and padding of rows."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ppo.models.micro_batch import PAD_ID, collate, pad_rows, plan_micro_batches

CPU = torch.device("cpu")


def _cost(lengths, plan, overhead):
    return sum(len(part) * max(lengths[i] for i in part) + overhead for part in plan)


@given(lengths=st.lists(st.integers(1, 60), max_size=30), budget=st.integers(1, 200), overhead=st.integers(0, 300))
def test_plan(lengths, budget, overhead):
    plan = plan_micro_batches(lengths, budget, overhead)
    assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
    for part in plan:
        assert part
        assert len(part) * max(lengths[i] for i in part) <= budget or len(part) == 1
    # similar lengths stand together: no micro-batch has a row that is shorter than one of an earlier one
    ordered = [lengths[i] for part in plan for i in part]
    assert ordered == sorted(ordered)
    assert plan_micro_batches(list(lengths), budget, overhead) == plan


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), budget=st.integers(1, 60), overhead=st.integers(0, 30)
)
def test_no_split_of_the_sorted_rows_costs_less(lengths, budget, overhead):
    """Every way to cut the sorted rows, one by one."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs = []
    for cuts in itertools.product((False, True), repeat=len(lengths) - 1):
        bounds = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), len(lengths)]
        parts = [order[start:end] for start, end in itertools.pairwise(bounds)]
        if all(len(part) == 1 or len(part) * lengths[part[-1]] <= budget for part in parts):
            costs.append(_cost(lengths, parts, overhead))
    assert _cost(lengths, plan_micro_batches(lengths, budget, overhead), overhead) == min(costs)


@given(lengths=st.permutations([3, 1, 4, 1, 5, 9, 2, 6]))
def test_plan_does_not_depend_on_the_order_of_rows(lengths):
    plan = plan_micro_batches(lengths, 12, 100)
    assert [[lengths[i] for i in part] for part in plan] == [[1, 1], [2, 3, 4], [5, 6], [9]]


def test_a_straggler_does_not_make_everybody_long():
    """Twenty short rows and a long one fit into one micro-batch, at nine times their tokens."""
    lengths = [20] * 20 + [190]
    assert [len(part) for part in plan_micro_batches(lengths, 4096, 128)] == [20, 1]
    assert [len(part) for part in plan_micro_batches(lengths, 4096, 10_000)] == [21]


def test_collate(kit):
    rows = [
        kit.trajectory([5], [9, 9]),
        kit.trajectory([2, 3, 4], [6, 0, 8], [True, False, True]),
        kit.trajectory([7, 7], [1]),
    ]
    batch = collate(rows, [2, 1], CPU)
    assert batch.indices == (2, 1)
    assert batch.input_ids.tolist() == [[7, 7, 1, PAD_ID, PAD_ID, PAD_ID], [2, 3, 4, 6, 0, 8]]
    assert batch.response_ids.tolist() == [[1, PAD_ID, PAD_ID], [6, 0, 8]]
    assert batch.mask.tolist() == [[True, False, False], [True, False, True]]
    assert batch.state_index[0, 0] == 1
    assert batch.state_index[1].tolist() == [2, 3, 4]
    assert batch.final_index.tolist() == [2, 5]
    assert int(batch.state_index.max()) < batch.input_ids.shape[1]


def test_every_generated_token_is_predicted_by_the_one_before_it(kit):
    rows = kit.ragged(8, seed=21)
    batch = collate(rows, range(8), CPU)
    following = batch.input_ids.gather(1, (batch.state_index + 1).clamp(max=batch.input_ids.shape[1] - 1))
    assert torch.equal(following[batch.mask], batch.response_ids[batch.mask])
    assert int(batch.mask.sum()) == sum(int(row.response_mask.sum()) for row in rows)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.int64])
def test_pad_rows(dtype):
    padded = pad_rows([torch.ones(2, dtype=dtype), torch.ones(0, dtype=dtype), torch.ones(3, dtype=dtype)], 4, CPU)
    assert padded.dtype == dtype
    assert padded.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
