"""The rollouts part of a checkpoint: finished groups with their payload, and the prompts that were in flight."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.group_codec import decode_group, decode_siblings, encode_group, encode_siblings
from lightning_ppo.rollout.journal import Lineage
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.validation import is_count

FORMAT = 1
_COLUMNS = ("draws", "targets", "start_versions", "sizes")
"""One entry per saved draw; the ready ones come first."""
_KEYS = frozenset({"format", "group_size", "num_ready", "lineage", "payload", "checksum", *_COLUMNS})


@dataclass(frozen=True)
class PendingDraw:
    """A drawn prompt that has to be generated (again)."""

    draw: int
    row: int
    """Its row in the data set."""
    target_step: int | None
    """The PPO step that must train it, or None."""
    start_version: int
    """Policy version of its dispatch; with finished trajectories kept, that of their dispatch."""
    finished: Mapping[int, Trajectory] = field(default_factory=dict)
    """Trajectories that need not be generated, by their index within the group."""


@dataclass(frozen=True)
class SavedRollouts:
    """What `decode_rollouts` found."""

    ready: tuple[PromptGroup, ...] = ()
    in_flight: tuple[PendingDraw, ...] = ()
    lineage: Lineage = field(default_factory=list)
    """`Journal.lineage` at the checkpoint; empty without a journal."""


def encode_rollouts(
    ready: Sequence[PromptGroup],
    in_flight: Sequence[PendingDraw],
    prompts: PromptSet,
    group_size: int,
    lineage: Lineage | None = None,
) -> dict[str, Any]:
    """Encode rollouts for a checkpoint: plain values and one uint8 tensor, `torch.load(weights_only=True)` takes it.

    Args:
        ready: Finished groups.
        in_flight: Prompts that are being generated, with what is finished of them.
        prompts: The data set.
        group_size: G, trajectories per group.
        lineage: `Journal.lineage`, if there is a journal.

    Raises:
        ValueError: see `encode_group`.
    """
    parts = [encode_group(group) for group in ready]
    parts += [encode_siblings(prompts[pending.row], pending.finished) for pending in in_flight]
    drawn: list[PromptGroup | PendingDraw] = [*ready, *in_flight]
    plain = {
        "format": FORMAT,
        "group_size": group_size,
        "num_ready": len(ready),
        "lineage": [list(entry) for entry in lineage or []],
        "draws": [item.draw for item in drawn],
        "targets": [item.target_step for item in drawn],
        "start_versions": [item.start_version for item in drawn],
        "sizes": [len(part) for part in parts],
    }
    payload = b"".join(parts)
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    return plain | {"payload": tensor, "checksum": _checksum(plain, payload)}


def decode_rollouts(
    state: Mapping[str, Any], prompts: PromptSet, group_size: int, row_of: Callable[[int], int]
) -> SavedRollouts:
    """Check and decode what `encode_rollouts` returned; nothing of it is used unless all of it is sound.

    Args:
        state: From the checkpoint.
        prompts: The data set.
        group_size: G of this run.
        row_of: The row that a draw stands for (`PromptStream.row_of`).

    Raises:
        CheckpointError: a key is missing, the checksum is wrong, the format is another one, columns differ in length, a
            group has not `group_size` trajectories, a draw stands there twice, or a row is unknown or not its draw's.
    """
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        missing = sorted(_KEYS - set(state)) if isinstance(state, Mapping) else sorted(_KEYS)
        raise _unsound(f"they lack {', '.join(missing)}")
    payload = state["payload"]
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8:
        raise _unsound("their payload is not a uint8 tensor")
    data = payload.contiguous().numpy().tobytes()
    plain = {key: state[key] for key in _KEYS - {"payload", "checksum"}}
    if _checksum(plain, data) != state["checksum"]:
        raise _unsound("their checksum is wrong")
    if plain["format"] != FORMAT:
        raise CheckpointError(f"saved rollouts have format {plain['format']}, not {FORMAT}; set restore=none")
    if plain["group_size"] != group_size:
        raise CheckpointError(
            f"num_generations_per_prompt={group_size} differs from the saved rollouts' {plain['group_size']}; "
            "resume with the same number, or set restore=none"
        )
    _check_columns(plain, len(data))
    ready: list[PromptGroup] = []
    in_flight: list[PendingDraw] = []
    end = 0
    for index, (draw, target, start_version, size) in enumerate(zip(*(plain[name] for name in _COLUMNS), strict=True)):
        begin, end = end, end + size
        if index >= plain["num_ready"]:
            finished = decode_siblings(data[begin:end], prompts)
            if not all(0 <= place < group_size for place in finished):
                raise _unsound(f"draw {draw} has trajectories {sorted(finished)} of {group_size}")
            in_flight.append(PendingDraw(draw, row_of(draw), target, start_version, finished))
            continue
        group = decode_group(data[begin:end], prompts)
        if (group.draw, group.target_step, group.start_version) != (draw, target, start_version):
            raise _unsound(f"draw {draw} has the payload of draw {group.draw}")
        if len(group.trajectories) != group_size or group.prompt.row != row_of(draw):
            row, count = group.prompt.row, len(group.trajectories)
            raise _unsound(f"draw {draw} has {count} of {group_size} trajectories, row {row} instead of {row_of(draw)}")
        ready.append(group)
    return SavedRollouts(tuple(ready), tuple(in_flight), [list(entry) for entry in plain["lineage"]])


def _check_columns(plain: Mapping[str, Any], num_bytes: int) -> None:
    columns = {name: plain[name] for name in _COLUMNS}
    if not all(isinstance(column, list) for column in columns.values()):
        raise _unsound("a column is not a list")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise _unsound(f"their columns differ in length ({lengths})")
    numbers = [*columns["draws"], *columns["start_versions"], *columns["sizes"], plain["num_ready"]]
    numbers += [target for target in columns["targets"] if target is not None]
    if not all(is_count(number, 0) for number in numbers):
        raise _unsound("a number is negative or no whole number")
    if len(set(columns["draws"])) != lengths["draws"]:
        raise _unsound("a draw stands there twice")
    entries = plain["lineage"]
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise _unsound("their lineage is no list of pairs")
    if sum(columns["sizes"]) != num_bytes or plain["num_ready"] > lengths["draws"]:
        raise _unsound(f"their payload has {num_bytes} of {sum(columns['sizes'])} bytes")


def _checksum(plain: Mapping[str, Any], payload: bytes) -> str:
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode())
    digest.update(payload)
    return digest.hexdigest()


def _unsound(what: str) -> CheckpointError:
    return CheckpointError(f"saved rollouts are damaged: {what}; resume from an intact checkpoint, or set restore=none")
