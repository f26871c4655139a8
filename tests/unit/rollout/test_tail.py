import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.tail import check_alignment, choose, group_alignment, tail_floor

P = 128


def rows(minimum: int, align: int, remaining: int, ready: "range | list[int]", take: int | None) -> list[tuple]:
    """One row of the table, for every ready count it names; `take=None`: everything ready is taken."""
    return [(minimum, align, remaining, n, n if take is None else take) for n in ready]


TABLE = [
    *rows(32, 1, 128, range(0, 32), 0),
    *rows(32, 1, 128, [32, 88, 111, 112, 128], None),
    *rows(32, 1, 40, range(32, 40), 0),
    *rows(32, 1, 40, [40], 40),
    *rows(32, 1, 17, range(0, 17), 0),
    *rows(32, 1, 17, [17], 17),
    *rows(32, 1, 16, [16], 16),
    *rows(32, 1, 128, range(113, 128), 0),
    *rows(32, 1, 47, range(32, 47), 0),
    *rows(32, 1, 48, [32], 32),
    *rows(32, 1, 48, [48], 48),
    *rows(32, 1, 48, range(33, 48), 0),
    *rows(32, 1, 49, [32, 33], None),
    *rows(32, 1, 49, range(34, 49), 0),
    *rows(85, 1, 128, [85], 85),
    *rows(85, 1, 128, range(86, 128), 0),
    *rows(85, 1, 128, [128], 128),
    *[row for minimum in range(86, 128) for row in rows(minimum, 1, 128, range(0, 128), 0)],
    *[row for minimum in range(86, 128) for row in rows(minimum, 1, 128, [128], 128)],
    *rows(33, 1, 128, [111], 111),
    *rows(33, 1, 128, [112], 0),
    *rows(32, 8, 128, [95], 88),
    *rows(32, 8, 128, range(113, 120), 112),
    *rows(32, 8, 128, range(120, 128), 0),
    *rows(32, 16, 128, [47], 32),
    *rows(32, 16, 128, range(112, 128), 112),
    *rows(32, 32, 128, range(96, 128), 96),
]


def test_every_row_of_the_table() -> None:
    for minimum, align, remaining, ready, take in TABLE:
        got = choose(ready, remaining, min_groups=minimum, align=align, streaming=True)
        assert got == take, (minimum, align, remaining, ready)


def test_align_16_never_defers_for_the_tail() -> None:
    for ready in range(32, 129):
        assert choose(ready, 128, min_groups=32, align=16, streaming=True) == ready - ready % 16


def test_more_ready_than_remaining_takes_the_remainder_only() -> None:
    assert choose(10, 4, min_groups=2, align=1, streaming=True) == 4


def test_without_streaming_no_tail_is_protected() -> None:
    assert choose(127, 128, min_groups=32, align=1, streaming=False) == 127
    assert choose(127, 128, min_groups=128, align=1, streaming=False) == 0


def test_minimum_that_is_no_multiple_of_align_rounds_up() -> None:
    assert choose(35, 128, min_groups=33, align=8, streaming=True) == 0
    assert choose(40, 128, min_groups=33, align=8, streaming=True) == 40


@pytest.mark.parametrize(("minimum", "floor"), [(1, 1), (2, 1), (32, 16), (33, 17), (85, 43), (86, 43)])
def test_tail_floor_rounds_up(minimum: int, floor: int) -> None:
    assert tail_floor(minimum) == floor


@pytest.mark.parametrize(
    ("generations", "dp_sizes", "micro_batch_rows", "align"),
    [
        (16, (4, 8), (), 1),
        (1, (8, 8), (), 8),
        (4, (8, 8), (), 2),
        (3, (4, 4), (), 4),
        # Policy: inference 4 and training 4 rows per rank; value: inference 4.
        (16, (4, 8), (4 * 4, 4 * 4, 8 * 4), 2),
        # Policy: inference 4, training 8; value: inference 2.
        (8, (4, 4), (4 * 4, 4 * 8, 4 * 2), 4),
    ],
)
def test_group_alignment(generations: int, dp_sizes: tuple, micro_batch_rows: tuple, align: int) -> None:
    got = group_alignment(generations=generations, dp_sizes=dp_sizes, micro_batch_rows=micro_batch_rows)
    assert got == align


@given(
    st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.lists(st.integers(1, 24), max_size=3)
)
def test_group_alignment_is_the_smallest_that_divides(generations: int, dp: list[int], micro: list[int]) -> None:
    align = group_alignment(generations=generations, dp_sizes=dp, micro_batch_rows=micro)

    def fits(groups: int) -> bool:
        return all(Fraction(groups * generations, unit).denominator == 1 for unit in dp + micro)

    assert fits(align)
    assert not any(fits(groups) for groups in range(1, min(align, 200)))


def test_step_that_is_no_multiple_of_align_is_rejected() -> None:
    check_alignment(128, 32)
    with pytest.raises(ConfigError, match=r"num_prompts_per_step=128 .*24 groups.*; set a multiple of 24"):
        check_alignment(128, 24)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    align = draw(st.integers(1, 6))
    size = align * draw(st.integers(1, 20))
    minimum = draw(st.integers(1, size))
    bursts = draw(st.lists(st.integers(1, 2 * size), min_size=1, max_size=40))
    return size, minimum, align, bursts


@settings(max_examples=300, deadline=None)
@given(arrivals(), st.randoms(use_true_random=False))
def test_every_arrival_order_trains_each_group_once_in_aligned_chunks(case: tuple, rng) -> None:
    size, minimum, align, bursts = case
    steps = 3
    coming = list(range(steps * size))
    rng.shuffle(coming)
    ready: list[int] = []
    trained: list[int] = []
    for _ in range(steps):
        remaining = size
        while remaining:
            take = choose(len(ready), remaining, min_groups=minimum, align=align, streaming=minimum < size)
            if take == 0:
                assert coming, "waits although every group is ready: would never end"
                burst = bursts.pop(0) if bursts else 1
                ready, coming = ready + coming[:burst], coming[burst:]
                continue
            assert take % align == 0
            assert take >= min(minimum, remaining)
            left = remaining - take
            assert left == 0 or left >= math.ceil(minimum / 2) or minimum == size
            trained += ready[:take]
            ready = ready[take:]
            remaining = left
    assert sorted(trained) == list(range(steps * size))
