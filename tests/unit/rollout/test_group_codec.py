import dataclasses
import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout import group_codec
from lightning_ppo.rollout.group_codec import decode_group, decode_siblings, encode_group, encode_siblings
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.testing import char_tokenizer

ROWS = ["^a=", "^abc=", "|z"]
PROMPTS = PromptSet([{"prompt": text, "answer": text} for text in ROWS], char_tokenizer(), 8)
FLOAT32 = st.integers(0, 2**32 - 1)
FLOAT64 = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])


@st.composite
def trajectories(draw: Any, row: int, name: str, prompt_ids: torch.Tensor) -> Trajectory:
    size = draw(st.integers(0, 12))
    bits = draw(st.lists(FLOAT32, min_size=size, max_size=size))
    versions = draw(st.lists(st.integers(0, 3) | st.integers(0, 2**62), min_size=size, max_size=size))
    return Trajectory(
        sample_id=name,
        prompt_ids=prompt_ids,
        response_ids=torch.tensor(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), dtype=torch.int64
        ),
        response_mask=torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool),
        rollout_logprobs=torch.from_numpy(np.array(bits, np.uint32).view(np.float32)),
        policy_versions=torch.tensor(versions, dtype=torch.int64),
        reward=draw(FLOAT64 | st.floats(-2, 2)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        response_text=draw(st.text(st.characters(), max_size=8)),
    )


@st.composite
def groups(draw: Any) -> PromptGroup:
    row = draw(st.integers(0, len(ROWS) - 1))
    prompt_ids = torch.tensor(PROMPTS[row].token_ids, dtype=torch.int64)
    number = draw(st.integers(0, 2**40))
    size = draw(st.integers(1, 4))
    return PromptGroup(
        group_id=f"draw{number}",
        draw=number,
        prompt=PROMPTS[row],
        target_step=draw(st.none() | st.integers(0, 2**40)),
        start_version=draw(st.integers(0, 2**40)),
        end_version=draw(st.integers(0, 2**40)),
        trajectories=tuple(draw(trajectories(row, f"draw{number}_g{index}", prompt_ids)) for index in range(size)),
        generation_s=draw(st.floats(0, 1e6)),
    )


def group_of(row: int = 0, response: tuple[int, ...] = (6, 7, 1), **changes: Any) -> PromptGroup:
    prompt_ids = torch.tensor(PROMPTS[row].token_ids, dtype=torch.int64)
    one = Trajectory(
        sample_id="draw3_g0",
        prompt_ids=prompt_ids,
        response_ids=torch.tensor(response, dtype=torch.int64),
        response_mask=torch.ones(len(response), dtype=torch.bool),
        rollout_logprobs=torch.full((len(response),), -0.3),
        policy_versions=torch.tensor([4] * (len(response) - 1) + [5]),
        reward=0.1,
        finish_reason="stop",
        response_text="ab",
    )
    two = dataclasses.replace(one, sample_id="draw3_g1", finish_reason="length")
    return dataclasses.replace(PromptGroup("draw3", 3, PROMPTS[row], 5, 4, 5, (one, two), 0.25), **changes)


def bits_of(value: Any) -> Any:
    """Everything of a value, comparable bit by bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, tuple):
        return tuple(map(bits_of, value))
    if isinstance(value, PromptGroup | Trajectory):
        return {field.name: bits_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@settings(deadline=None)
@given(groups())
def test_a_group_comes_back_bit_by_bit(group: PromptGroup) -> None:
    again = decode_group(encode_group(group), PROMPTS)
    assert bits_of(again) == bits_of(group)
    assert len({id(row.prompt_ids) for row in again.trajectories}) == 1
    storages = {row.response_ids.untyped_storage().data_ptr() for row in again.trajectories if len(row.response_ids)}
    assert len(storages) == sum(len(row.response_ids) > 0 for row in again.trajectories)


@settings(deadline=None)
@given(groups(), st.data())
def test_siblings_come_back_under_their_index(group: PromptGroup, data: st.DataObject) -> None:
    indices = data.draw(st.permutations(range(len(group.trajectories))))
    finished = {index: group.trajectories[index] for index in indices[: data.draw(st.integers(0, len(indices)))]}
    again = decode_siblings(encode_siblings(group.prompt, finished), PROMPTS)
    assert list(again) == list(finished)
    assert bits_of(tuple(again.values())) == bits_of(tuple(finished.values()))


def test_lone_surrogates_survive() -> None:
    rows = tuple(dataclasses.replace(row, response_text="a\ud800b\u2028\x00") for row in group_of().trajectories)
    again = decode_group(encode_group(group_of(trajectories=rows)), PROMPTS)
    assert again.trajectories[0].response_text == "a\ud800b\u2028\x00"


def refused(data: bytes, prompts: PromptSet = PROMPTS, match: str = "a saved rollout") -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        decode_group(data, prompts)
    assert len(str(caught.value).splitlines()) == 1


def test_every_truncation_is_refused() -> None:
    data = encode_group(group_of())
    for size in range(len(data)):
        refused(data[:size])
    refused(data + b"\0")


def test_every_bit_flip_is_refused() -> None:
    data = encode_group(group_of())
    for place in range(8 * len(data)):
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        refused(bytes(broken))


@settings(deadline=None)
@given(groups(), st.data())
def test_damage_anywhere_in_any_group_is_refused(group: PromptGroup, data: st.DataObject) -> None:
    whole = encode_group(group)
    broken = bytearray(whole)
    broken[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    refused(bytes(broken))
    refused(whole[: data.draw(st.integers(0, len(whole) - 1))])


def sealed(data: bytes, change: Any) -> bytes:
    """Change the payload and make the header fit again: what a faulty writer would leave."""
    start = group_codec._HEADER.size + 4
    payload = change(data[start:])
    header = group_codec._HEADER.pack(b"LPRG", group_codec.FORMAT, 1, len(payload))
    return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
        lambda payload: b"",
        lambda payload: payload[:2],
        lambda payload: struct.pack("<I", 2**31) + payload[4:],
        lambda payload: payload.replace(b'"stop"', b'"halt"'),
        lambda payload: payload.replace(b'"rows"', b'"rose"'),
        lambda payload: payload.replace(b'"draw"', b'"drew"'),
        lambda payload: payload.replace(b'"versions":[4,5]', b'"versions":[4.5]'),
        lambda payload: payload.replace(b'"row":0', b'"row":x'),
        lambda payload: payload.replace(b'"runs":4', b'"runs":3'),
    ],
)
def test_a_wrong_structure_under_a_right_checksum_is_refused(change: Any) -> None:
    data = encode_group(group_of())
    assert sealed(data, lambda payload: payload) == data
    assert sealed(data, change) != data
    refused(sealed(data, change), match="damaged")


def test_siblings_are_not_taken_for_a_group() -> None:
    group = group_of()
    refused(encode_siblings(group.prompt, {0: group.trajectories[0]}), match="damaged")
    with pytest.raises(CheckpointError, match="damaged"):
        decode_siblings(encode_group(group), PROMPTS)


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_codec, "FORMAT", 2)
    data = encode_group(group_of())
    monkeypatch.undo()
    refused(data, match="has format 2, not 1")


def test_a_row_that_the_data_set_lacks_is_refused() -> None:
    fewer = PromptSet([{"prompt": "^a="}], char_tokenizer(), 8)
    refused(encode_group(group_of(row=2)), fewer, match="is of row 2, the data set has 1")


def test_another_tokenization_of_the_row_is_refused() -> None:
    other = PromptSet([{"prompt": "^b="}], char_tokenizer(), 8)
    refused(encode_group(group_of(row=0)), other, match="row 0 has other tokens now")


@pytest.mark.parametrize("token", [-1, 2**31, 2**40])
def test_ids_beyond_31_bits_are_not_written(token: int) -> None:
    with pytest.raises(ValueError, match="not in 31 bits"):
        encode_group(group_of(response=(6, token, 1)))


def test_what_does_not_belong_together_is_not_written() -> None:
    with pytest.raises(ValueError, match="draw3_g0 has another prompt than row 1"):
        encode_group(group_of(prompt=PROMPTS[1]))
    row = dataclasses.replace(group_of().trajectories[0], rollout_logprobs=torch.zeros(2))
    with pytest.raises(ValueError, match="draw3_g0 has tensors of different lengths"):
        encode_group(group_of(trajectories=(row,)))


def test_it_is_compact() -> None:
    # 9 bytes and a bit per token, against 21 in the tensors
    long = group_of(response=tuple([7] * 1000))
    assert len(encode_group(long)) < 2 * 1000 * 8.2 + 400


def test_not_a_number_is_kept() -> None:
    rows = tuple(dataclasses.replace(row, reward=math.nan) for row in group_of().trajectories)
    assert math.isnan(decode_group(encode_group(group_of(trajectories=rows)), PROMPTS).trajectories[1].reward)
