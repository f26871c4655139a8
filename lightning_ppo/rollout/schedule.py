"""The schedule of a run, `schedule.jsonl`: written while it trains, replayed for a bitwise equal run.

A line `{"run": {...}}` stands before the first step of every start (`RunHeader`); a start that resumes at step s voids
the lines of s and later steps before it. Every PPO step adds a line::

    {"ppo_step": s, "chunks": [[draw, ...], ...], "groups": [[version, responses, rewards], ...], "weights": n}

`groups` holds a `GroupRecord` row for every draw, in the order of the chunks; the step is their target step. `weights`
is the checksum of the policy after the step.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ppo.errors import DataError, RolloutError
from lightning_ppo.rollout.group_record import GroupRecord
from lightning_ppo.rollout.run_header import RunHeader
from lightning_ppo.validation import is_count

Chunks = tuple[tuple[int, ...], ...]
"""Draws of each chunk of one PPO step, chunks in training order."""

_WANTED = '{"ppo_step": s, "chunks": [[draw, ...], ...], ...}'


@dataclass(frozen=True)
class StepRecord:
    """One PPO step of a schedule."""

    chunks: Chunks
    groups: tuple[GroupRecord, ...] = ()
    """In the order of the chunks' draws; empty if they were not recorded."""
    weights: int | None = None
    """Checksum of the policy after the step."""


@dataclass(frozen=True)
class Schedule:
    """What stands in a `schedule.jsonl`."""

    headers: tuple[RunHeader, ...]
    """One per start of the run."""
    steps: Mapping[int, StepRecord]

    @classmethod
    def load(cls, path: str | Path, field: str = "replay_schedule") -> "Schedule":
        """Read a file. Of a step that stands there twice (after a resume) the last line counts.

        A line that is no JSON is left out where a run was killed while it wrote: at the end, and before a header.

        Args:
            path: The file.
            field: The setting that names it, for messages.

        Raises:
            DataError: the file cannot be read, or a line is malformed; the message names the line.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{field}={path} cannot be read ({error}); give the schedule.jsonl of a run") from error
        headers: list[RunHeader] = []
        steps: dict[int, StepRecord] = {}
        cut: DataError | None = None
        for number, line in enumerate(lines, 1):
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                cut = cut or DataError(f"{place}: {error}; every line must be {_WANTED}")
                continue
            try:
                if isinstance(row, dict) and set(row) == {"run"}:
                    headers.append(RunHeader.from_row(row["run"]))
                    steps = {step: record for step, record in steps.items() if step < headers[-1].ppo_step}
                    cut = None
                else:
                    step, steps_record = _parse(row)
                    steps[step] = steps_record
            except ValueError as error:
                raise DataError(f"{place}: {error}; every line must be {_WANTED}") from error
            if cut is not None:
                raise cut
        return cls(tuple(headers), steps)


class ChunkSchedule:
    """The recorded chunks of every PPO step of an earlier run.

    Args:
        steps: Chunks of each PPO step.
        source: Where they come from, for messages.
    """

    def __init__(self, steps: Mapping[int, Chunks], source: str) -> None:
        self._steps = dict(steps)
        self.source = source
        """Where they come from."""

    @classmethod
    def load(cls, path: str | Path) -> "ChunkSchedule":
        """Read the chunks of a `schedule.jsonl`; see `Schedule.load`.

        Raises:
            DataError: the file cannot be read, or a line is malformed.
        """
        steps = Schedule.load(path, "replay_chunks").steps
        return cls({step: record.chunks for step, record in steps.items()}, str(path))

    @staticmethod
    def append(
        path: str | Path,
        ppo_step: int,
        chunks: Iterable[Sequence[int]],
        groups: Iterable[GroupRecord] = (),
        weights: int | None = None,
    ) -> None:
        """Append one finished PPO step to `path`, creating the file if need be.

        Args:
            path: The file.
            ppo_step: The step.
            chunks: Draws of each of its chunks.
            groups: Records of its groups, in the order of the chunks' draws.
            weights: Checksum of the policy after it.

        Raises:
            RolloutError: the file cannot be written.
        """
        row: dict[str, Any] = {"ppo_step": ppo_step, "chunks": [list(chunk) for chunk in chunks]}
        records = [record.as_row() for record in groups]
        if records:
            row["groups"] = records
        if weights is not None:
            row["weights"] = weights
        _append(path, row)

    @staticmethod
    def start(path: str | Path, header: RunHeader) -> None:
        """Append the header of a run that starts now, creating the file if need be.

        Raises:
            RolloutError: the file cannot be written.
        """
        _append(path, {"run": header.as_row()})

    def chunks_of(self, ppo_step: int) -> Chunks:
        """Return the chunks of a PPO step.

        Raises:
            DataError: the step was not recorded.
        """
        if ppo_step not in self._steps:
            raise DataError(f"{self.source} has no PPO step {ppo_step}; replay no further than the recorded run went")
        return self._steps[ppo_step]

    def next_chunk(self, ppo_step: int, consumed: int, groups_per_step: int, align: int = 1) -> tuple[int, ...]:
        """Return the draws of the chunk that starts after `consumed` groups of this step.

        Raises:
            DataError: the step was not recorded, does not hold `groups_per_step` groups, has no chunk boundary there,
                or the chunk's size is no multiple of `align`.
        """
        chunks = self.chunks_of(ppo_step)
        total = sum(map(len, chunks))
        if total != groups_per_step:
            raise DataError(
                f"{self.source} PPO step {ppo_step}: {total} groups recorded, num_prompts_per_step={groups_per_step}; "
                f"replay with the settings of the recorded run"
            )
        start = 0
        for chunk in chunks:
            if start == consumed and len(chunk) % align:
                raise DataError(
                    f"{self.source} PPO step {ppo_step}: a chunk of {len(chunk)} groups does not divide over all "
                    f"ranks (multiples of {align} do); replay with as many processes as the recorded run"
                )
            if start == consumed:
                return chunk
            start += len(chunk)
        raise DataError(
            f"{self.source} PPO step {ppo_step}: no chunk starts after {consumed} groups; "
            f"replay a step from its first chunk"
        )


def _append(path: str | Path, row: dict[str, Any]) -> None:
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a+b") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # behind half a line, which a killed run left, this one would be lost as well
                    line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise RolloutError(
            f"schedule={path} cannot be written ({error}); free some space, or make it writable"
        ) from error


def _parse(row: Any) -> tuple[int, StepRecord]:
    if not isinstance(row, dict) or set(row) - {"groups", "weights"} != {"ppo_step", "chunks"}:
        raise ValueError("not an object with the keys ppo_step and chunks")
    step, chunks, groups, weights = row["ppo_step"], row["chunks"], row.get("groups", []), row.get("weights")
    if not is_count(step, 0):
        raise ValueError(f"ppo_step={step!r} is not a whole number >= 0")
    if not isinstance(chunks, list) or not chunks or not all(isinstance(chunk, list) and chunk for chunk in chunks):
        raise ValueError("chunks is not a list of non-empty lists")
    draws = [draw for chunk in chunks for draw in chunk]
    if not all(is_count(draw, 0) for draw in draws):
        raise ValueError("a draw is not a whole number >= 0")
    if len(set(draws)) != len(draws):
        raise ValueError("a draw stands there twice")
    if not isinstance(groups, list) or (groups and len(groups) != len(draws)):
        raise ValueError(f"groups is not a list of {len(draws)} records")
    if weights is not None and not is_count(weights, 0):
        raise ValueError(f"weights={weights!r} is not a whole number >= 0")
    records = [GroupRecord.from_row(draw, record) for draw, record in zip(draws, groups, strict=bool(groups))]
    return step, StepRecord(tuple(tuple(chunk) for chunk in chunks), tuple(records), weights)
