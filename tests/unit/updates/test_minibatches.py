"""Shuffled minibatches: every row once, an order of their own for every pass, the same again after a resume."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ppo.updates.minibatches import shuffled_minibatches


def orders(count, parts, *seeds):
    return [tuple(map(tuple, shuffled_minibatches(range(count), parts, seed))) for seed in seeds]


@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.tuples(st.sampled_from(["policy", "critic"]), st.integers(0, 2**64), st.integers(0, 10**6), st.integers(0, 99)),
)
def test_every_row_is_in_one_minibatch(count, parts, seed):
    """Seeds of any size: a product of run seed and step overflowed torch's 64 bits in the middle of a step."""
    (order,) = orders(count, parts, seed)
    assert sorted(row for minibatch in order for row in minibatch) == list(range(count))
    sizes = [len(minibatch) for minibatch in order]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert orders(count, parts, seed) == [order]


def test_every_pass_has_an_order_of_its_own():
    seeds = list(product(("policy", "critic"), (0, 1), (0, 1), (0, 1)))
    found = orders(20, 4, *seeds)
    assert len(set(found)) == len(seeds)


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_single_minibatch_is_the_step_as_it_came(epoch):
    assert orders(9, 1, ("critic", 7, 2, epoch)) == [(tuple(range(9)),)]
