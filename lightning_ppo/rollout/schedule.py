"""The schedule of a run, one line per PPO step: written while it trains, replayed for a bitwise equal run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ppo.errors import DataError
from lightning_ppo.rollout.group_record import GroupRecord

Chunks = tuple[tuple[int, ...], ...]
"""Draws of each chunk of one PPO step, chunks in training order."""


class ChunkSchedule:
    """The recorded chunks of every PPO step of an earlier run.

    Args:
        steps: Chunks of each PPO step.
        source: Where they come from, for messages.
    """

    def __init__(self, steps: Mapping[int, Chunks], source: str) -> None:
        self._steps = dict(steps)
        self._source = source

    @classmethod
    def load(cls, path: str | Path) -> "ChunkSchedule":
        """Read a `schedule.jsonl`. Of a step that stands there twice (after a resume) the last line counts.

        Raises:
            DataError: the file cannot be read, or a line is not
                `{"ppo_step": s, "chunks": [[draw, ...], ...], ...}` with whole numbers, every draw
                once, no empty chunk.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"replay_chunks={path} cannot be read ({error}); give the schedule.jsonl of a run"
            ) from error
        steps: dict[int, Chunks] = {}
        for number, line in enumerate(lines, 1):
            try:
                step, chunks = _parse(json.loads(line))
            except ValueError as error:
                wanted = '{"ppo_step": s, "chunks": [[draw, ...], ...], ...}'
                raise DataError(f"{path} line {number}: {error}; every line must be {wanted}") from error
            steps[step] = chunks
        return cls(steps, str(path))

    @staticmethod
    def append(
        path: str | Path, ppo_step: int, chunks: Iterable[Sequence[int]], groups: Iterable[GroupRecord] = ()
    ) -> None:
        """Append one finished PPO step to `path`, creating the file if need be.

        Args:
            path: The file.
            ppo_step: The step.
            chunks: Draws of each of its chunks.
            groups: What `RecordedRun` needs about each of its groups.
        """
        row: dict[str, Any] = {"ppo_step": ppo_step, "chunks": [list(chunk) for chunk in chunks]}
        records = [record.as_row() for record in groups]
        line = json.dumps(row | {"groups": records} if records else row)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def chunks_of(self, ppo_step: int) -> Chunks:
        """Return the chunks of a PPO step.

        Raises:
            DataError: the step was not recorded.
        """
        if ppo_step not in self._steps:
            raise DataError(f"{self._source} has no PPO step {ppo_step}; replay no further than the recorded run went")
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
                f"{self._source} PPO step {ppo_step}: {total} groups recorded, num_prompts_per_step={groups_per_step}; "
                f"replay with the settings of the recorded run"
            )
        start = 0
        for chunk in chunks:
            if start == consumed and len(chunk) % align:
                raise DataError(
                    f"{self._source} PPO step {ppo_step}: a chunk of {len(chunk)} groups does not divide over all "
                    f"ranks (multiples of {align} do); replay with as many processes as the recorded run"
                )
            if start == consumed:
                return chunk
            start += len(chunk)
        raise DataError(
            f"{self._source} PPO step {ppo_step}: no chunk starts after {consumed} groups; "
            f"replay a step from its first chunk"
        )


def _parse(row: Any) -> tuple[int, Chunks]:
    if not isinstance(row, dict) or set(row) - {"groups"} != {"ppo_step", "chunks"}:
        raise ValueError("not an object with the keys ppo_step and chunks")
    step, chunks = row["ppo_step"], row["chunks"]
    if not _is_count(step):
        raise ValueError(f"ppo_step={step!r} is not a whole number >= 0")
    if not isinstance(chunks, list) or not chunks or not all(isinstance(chunk, list) and chunk for chunk in chunks):
        raise ValueError("chunks is not a list of non-empty lists")
    draws = [draw for chunk in chunks for draw in chunk]
    if not all(map(_is_count, draws)):
        raise ValueError("a draw is not a whole number >= 0")
    if len(set(draws)) != len(draws):
        raise ValueError("a draw stands there twice")
    return step, tuple(tuple(chunk) for chunk in chunks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
