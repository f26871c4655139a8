"""The host copy and its buckets."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket, join, piece_bytes, split
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.layout import ALIGNMENT, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)


def weights_of(shapes, seed=0):
    torch.manual_seed(seed)
    return [(f"w{index}", torch.randn(shape)) for index, shape in enumerate(shapes)]


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 700))
def test_buckets_cover_every_tensor_once_and_keep_to_their_size(shapes, bucket_bytes):
    layout = FlatLayout.of(weights_of(shapes))
    buckets = split(layout, bucket_bytes)
    assert [slot for bucket in buckets for slot in bucket.slots] == list(layout.slots)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert bucket.slots
        assert bucket.num_bytes <= bucket_bytes or len(bucket.slots) == 1
        assert bucket.begin % ALIGNMENT == 0
        assert bucket.end <= max(layout.num_bytes, bucket.begin)
        rebuilt = Bucket.from_message(bucket.to_message())
        assert (rebuilt.slots, rebuilt.begin, rebuilt.end) == (bucket.slots, bucket.begin, bucket.end)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 700), st.integers(1, 1500), st.data())
def test_neighbours_that_are_complete_together_become_one_bucket(shapes, bucket_bytes, largest, data):
    buckets = split(FlatLayout.of(weights_of(shapes)), bucket_bytes)
    complete = data.draw(st.lists(st.sampled_from(buckets), unique=True)) if buckets else []
    joined = join(complete, largest)
    assert [slot for bucket in joined for slot in bucket.slots] == [s for bucket in complete for s in bucket.slots]
    for bucket in joined:
        assert bucket in complete or bucket.num_bytes <= largest
        Bucket.from_message(bucket.to_message())
    for left, right in itertools.pairwise(joined):
        assert right.begin < left.end or right.end - left.begin > largest or right not in buckets[left.index + 1 :][:1]


MIB = 1024 * 1024


def test_the_first_bucket_is_small():
    layout = FlatLayout.of([(f"w{index}", torch.empty(MIB // 16)) for index in range(10)])
    assert [len(bucket.slots) for bucket in split(layout, 32 * MIB)] == [4, 6]
    assert [len(bucket.slots) for bucket in split(layout, MIB // 2)] == [2] * 5
    (whole,) = join(split(layout, 32 * MIB), 32 * MIB)
    assert (whole.slots, whole.begin, whole.end) == (layout.slots, 0, layout.num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "largest", "expected"),
    [
        (4 * MIB, 256 * MIB, 32 * MIB),  # small: one bucket after the first
        (400 * MIB, 256 * MIB, 200 * MIB),  # the second is copied while the first is loaded
        (800 * MIB, 256 * MIB, 256 * MIB),
        (14_000 * MIB, 256 * MIB, 256 * MIB),
        (800 * MIB, 50_000, 50_000),
        (0, 7, 7),
    ],
)
def test_large_policies_travel_in_pieces_that_overlap(num_bytes, largest, expected):
    assert piece_bytes(num_bytes, largest) == expected


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.integers(1, 700), st.sampled_from([torch.float32, torch.bfloat16]), st.randoms())
def test_fill_yields_every_bucket_complete_in_any_order(shapes, bucket_bytes, dtype, random):
    weights = weights_of(shapes)
    host = HostWeights.of(weights, dtype, bucket_bytes)
    try:
        shuffled = random.sample(weights, len(weights))
        expected = {name: tensor.to(dtype) for name, tensor in weights}
        seen = []
        for bucket in host.fill(shuffled, 4):
            seen.append(bucket.index)
            assert host.version is None
            for name, tensor in host.tensors(bucket).items():
                assert torch.equal(tensor, expected[name])
            flat = host.flat(bucket)
            assert flat.numel() == bucket.num_bytes
        assert sorted(seen) == list(range(len(host.buckets)))
        assert host.version == 4
    finally:
        host.close()


def test_a_bucket_waits_until_one_more_tensor_is_good():
    weights = weights_of([(4,), (4,)])
    host = HostWeights.of(weights, torch.float32, 1)
    filling = host.fill([weights[0], ("w1", torch.zeros(5))], 1)
    with pytest.raises(EngineError, match=r"w1 is torch.float32\[5\] but was torch.float32\[4\]"):
        next(filling)
    host.close()


def test_source_strides_dtypes_and_integers():
    weights = [
        ("half", torch.arange(6.0).view(2, 3).t()),
        ("count", torch.tensor([1, 2])),
        ("scalar", torch.tensor(2.5)),
    ]
    host = HostWeights.of(weights, torch.bfloat16, 1 << 20)
    ((bucket),) = host.fill(weights, 1)
    tensors = host.tensors(bucket)
    assert tensors["half"].dtype == torch.bfloat16
    assert tensors["half"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensors["count"].dtype == torch.int64
    assert tensors["scalar"].item() == 2.5
    list(host.fill([(name, tensor.double() if name != "count" else tensor) for name, tensor in weights], 2))
    assert host.version == 2
    host.close()
    host.close()
    assert host.version is None


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"begin": 0, "end": 4},
        {"begin": 0, "end": 4, "slots": [["w", "float32"]]},
        {"begin": 0, "end": 4, "slots": [["w", "float32", [2], 0]]},
        {"begin": 64, "end": 128, "slots": [["w", "float32", [2], 0]]},
        {"begin": 0, "end": 4, "slots": [["w", "load", [1], 0]]},
        {"begin": 0, "end": "x", "slots": []},
    ],
)
def test_messages_that_are_no_bucket(message):
    with pytest.raises(EngineError):
        Bucket.from_message(message)
