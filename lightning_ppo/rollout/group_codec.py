"""Finished rollouts as bytes, for the journal and for checkpoints: compact, exact, without pickle.

Layout, all little-endian::

    magic "LPRG" | format u16 | kind u16 | payload bytes u32 | crc32 u32
    payload: head bytes u32 | head (JSON, utf-8) | runs [R, 2] i64 | rewards [G] f64 | log-probs [N] f32
             | response ids [N] i32 | response mask [ceil(N / 8)] bits

N counts the response tokens of all trajectories, one after the other. `runs` are (policy version, tokens) pairs over
these N tokens. The crc covers everything but itself. A prompt is stored as its row number, with a crc of its token ids:
another tokenizer over the same rows is noticed.
"""

import json
import operator
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_ppo.batch import FinishReason, Prompt, PromptGroup, Trajectory
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.validation import is_count

FORMAT = 1
"""Written into every encoding; others are refused."""
_MAGIC = b"LPRG"
_HEADER = struct.Struct("<4sHHI")
_U32 = struct.Struct("<I")
_GROUP, _SIBLINGS = 1, 2
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_MAX_ID = 2**31 - 1


def encode_group(group: PromptGroup) -> bytes:
    """Encode a finished group.

    Raises:
        ValueError: a token id is negative or does not fit into 31 bits, a trajectory has another prompt than its group,
            or its tensors differ in length.
    """
    head = {
        "group_id": group.group_id,
        "draw": group.draw,
        "target_step": group.target_step,
        "versions": [group.start_version, group.end_version],
        # hexadecimal: exact, infinities included
        "generation_s": float(group.generation_s).hex(),
    }
    return _encode(_GROUP, head, group.prompt, group.trajectories)


def decode_group(data: bytes, prompts: PromptSet) -> PromptGroup:
    """Decode what `encode_group` wrote; every tensor is bitwise the same, all trajectories share one prompt tensor.

    Raises:
        CheckpointError: the bytes are truncated or damaged, of another format, or of another row or tokenizer.
    """
    head, prompt, trajectories = _decode(data, _GROUP, prompts)
    try:
        start_version, end_version = head["versions"]
        return PromptGroup(
            group_id=head["group_id"],
            draw=head["draw"],
            prompt=prompt,
            target_step=head["target_step"],
            start_version=start_version,
            end_version=end_version,
            trajectories=tuple(trajectories),
            generation_s=float.fromhex(head["generation_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"{error!r}") from error


def encode_siblings(prompt: Prompt, finished: Mapping[int, Trajectory]) -> bytes:
    """Encode the finished trajectories of a group that is not complete yet, by their index within the group.

    Raises:
        ValueError: see `encode_group`.
    """
    return _encode(_SIBLINGS, {"indices": list(finished)}, prompt, list(finished.values()))


def decode_siblings(data: bytes, prompts: PromptSet) -> dict[int, Trajectory]:
    """Decode what `encode_siblings` wrote.

    Raises:
        CheckpointError: see `decode_group`.
    """
    head, _, trajectories = _decode(data, _SIBLINGS, prompts)
    try:
        return dict(zip(map(operator.index, head["indices"]), trajectories, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"{error!r}") from error


def _encode(kind: int, head: dict[str, Any], prompt: Prompt, trajectories: Sequence[Trajectory]) -> bytes:
    known: list[Tensor] = []
    rows = []
    for row in trajectories:
        size = len(row.response_ids)
        if not size == len(row.response_mask) == len(row.rollout_logprobs) == len(row.policy_versions):
            raise ValueError(f"{row.sample_id} has tensors of different lengths")
        # siblings usually share the tensor: it is compared once
        if not any(row.prompt_ids is tensor for tensor in known):
            if row.prompt_ids.tolist() != list(prompt.token_ids):
                raise ValueError(f"{row.sample_id} has another prompt than row {prompt.row}")
            known.append(row.prompt_ids)
        rows.append([row.sample_id, size, row.finish_reason, row.response_text])
    head |= {"row": prompt.row, "prompt_crc": _crc_of(prompt), "rows": rows}
    ids = _joined((row.response_ids for row in trajectories), np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() <= _MAX_ID:
        raise ValueError(f"response_ids of row {prompt.row} hold ids from {ids.min()} to {ids.max()}: not in 31 bits")
    runs = _runs(_joined((row.policy_versions for row in trajectories), np.int64))
    head["runs"] = len(runs)
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    payload = b"".join(
        (
            _U32.pack(len(text)),
            text,
            runs.astype("<i8").tobytes(),
            np.array([row.reward for row in trajectories], "<f8").tobytes(),
            _joined((row.rollout_logprobs for row in trajectories), np.float32).astype("<f4", copy=False).tobytes(),
            ids.astype("<i4").tobytes(),
            np.packbits(_joined((row.response_mask for row in trajectories), np.bool_)).tobytes(),
        )
    )
    header = _HEADER.pack(_MAGIC, FORMAT, kind, len(payload))
    return b"".join((header, _U32.pack(zlib.crc32(payload, zlib.crc32(header))), payload))


def _decode(data: bytes, kind: int, prompts: PromptSet) -> tuple[dict[str, Any], Prompt, list[Trajectory]]:
    payload = _checked(data, kind)
    try:
        begin = _U32.size + _U32.unpack_from(payload)[0]
        head = json.loads(payload[_U32.size : begin].decode("utf-8", "surrogatepass"))
        sizes = [size for _, size, _, _ in head["rows"]]
        total = sum(sizes)
        arrays = []
        for dtype, count in (("<i8", 2 * head["runs"]), ("<f8", len(sizes)), ("<f4", total), ("<i4", total)):
            arrays.append(np.frombuffer(payload, dtype, count, begin) if count else np.empty(0, dtype))
            begin += arrays[-1].nbytes
        runs, rewards, logprobs, ids = arrays
        bits = np.frombuffer(payload[begin:], np.uint8)
        if len(bits) != -(-total // 8):
            raise ValueError(f"{len(bits)} mask bytes for {total} tokens")
        mask = np.unpackbits(bits, count=total)
        versions = np.repeat(runs[0::2], runs[1::2])
        if len(versions) != total:
            raise ValueError(f"{len(versions)} policy versions for {total} tokens")
        prompt = _prompt(head, prompts)
        prompt_ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        rows = []
        begin = 0
        for (sample_id, size, reason, text), reward in zip(head["rows"], rewards.tolist(), strict=True):
            if reason not in _REASONS:
                raise ValueError(f"finish_reason={reason}")
            part = slice(begin, begin + size)
            begin += size
            # astype copies: every tensor owns its storage, and may be written to
            rows.append(
                Trajectory(
                    sample_id=sample_id,
                    prompt_ids=prompt_ids,
                    response_ids=torch.from_numpy(ids[part].astype(np.int64)),
                    response_mask=torch.from_numpy(mask[part].astype(np.bool_)),
                    rollout_logprobs=torch.from_numpy(logprobs[part].astype(np.float32)),
                    policy_versions=torch.from_numpy(versions[part].astype(np.int64)),
                    reward=reward,
                    finish_reason=reason,
                    response_text=text,
                )
            )
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise _damaged(f"{error!r}") from error
    return head, prompt, rows


def _checked(data: bytes, kind: int) -> bytes:
    start = _HEADER.size + _U32.size
    if len(data) < start:
        raise _damaged(f"{len(data)} bytes")
    magic, version, found, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged("no rollout starts here")
    if zlib.crc32(data[start:], zlib.crc32(data[: _HEADER.size])) != _U32.unpack_from(data, _HEADER.size)[0]:
        raise _damaged("its checksum is wrong")
    if version != FORMAT:
        raise CheckpointError(f"a saved rollout has format {version}, not {FORMAT}; resume with the version that saved")
    if found != kind or size != len(data) - start:
        raise _damaged(f"kind {found}, {len(data) - start} of {size} bytes")
    return data[start:]


def _prompt(head: Mapping[str, Any], prompts: PromptSet) -> Prompt:
    row = head["row"]
    if not is_count(row, 0) or row >= len(prompts):
        raise CheckpointError(
            f"a saved rollout is of row {row}, the data set has {len(prompts)}; use the same data set"
        )
    prompt = prompts[row]
    if _crc_of(prompt) != head["prompt_crc"]:
        raise CheckpointError(f"the prompt of row {row} has other tokens now; resume with the same data and tokenizer")
    return prompt


def _crc_of(prompt: Prompt) -> int:
    return zlib.crc32(np.array(prompt.token_ids, "<i8").tobytes())


def _joined(tensors: Iterable[Tensor], dtype: type[np.generic]) -> "np.ndarray[Any, Any]":
    parts = [tensor.numpy() for tensor in tensors]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _runs(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Run-length encode `[N]` values as `[R, 2]` (value, count) pairs."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.empty(0, np.int64)
    counts = np.diff(starts, append=len(values))
    return np.stack((values[starts], counts), axis=1)


def _damaged(what: str) -> CheckpointError:
    line = " ".join(what.split())
    return CheckpointError(
        f"a saved rollout is damaged ({line}); resume from an intact checkpoint, or set restore=none"
    )
