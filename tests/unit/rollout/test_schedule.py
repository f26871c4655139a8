from pathlib import Path

import pytest

from lightning_ppo.errors import DataError
from lightning_ppo.rollout.schedule import ChunkSchedule


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    ChunkSchedule.append(path, 0, [(1, 0), (2, 3)])
    ChunkSchedule.append(path, 1, [[4, 5, 6, 7]])
    schedule = ChunkSchedule.load(path)
    assert path.read_text().splitlines()[0] == '{"ppo_step":0,"chunks":[[1,0],[2,3]]}'
    assert schedule.chunks_of(0) == ((1, 0), (2, 3))
    assert schedule.chunks_of(1) == ((4, 5, 6, 7),)
    assert schedule.next_chunk(0, 2, 4) == (2, 3)


def test_the_last_line_of_a_repeated_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    ChunkSchedule.append(path, 0, [(0, 1)])
    ChunkSchedule.append(path, 0, [(0,), (1,)])
    assert ChunkSchedule.load(path).chunks_of(0) == ((0,), (1,))


def test_missing_step_names_step_and_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    ChunkSchedule.append(path, 0, [(0,)])
    with pytest.raises(DataError, match=r"schedule\.jsonl has no PPO step 7"):
        ChunkSchedule.load(path).chunks_of(7)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "",
        "[]",
        '{"ppo_step": 1}',
        '{"ppo_step": -1, "chunks": [[0]]}',
        '{"ppo_step": true, "chunks": [[0]]}',
        '{"ppo_step": 1, "chunks": []}',
        '{"ppo_step": 1, "chunks": [[]]}',
        '{"ppo_step": 1, "chunks": [["a"]]}',
        '{"ppo_step": 1, "chunks": [[1.0]]}',
        '{"ppo_step": 1, "chunks": [[1], [1]]}',
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text('{"ppo_step": 0, "chunks": [[0]]}\n' + line + "\n")
    with pytest.raises(DataError, match=r"schedule\.jsonl line 2: [^\n]*$"):
        ChunkSchedule.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"replay_chunks=.*nothing\.jsonl cannot be read"):
        ChunkSchedule.load(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("consumed", "size", "align", "message"),
    [
        (0, 5, 1, "4 groups recorded, num_prompts_per_step=5"),
        (1, 4, 1, "no chunk starts after 1 groups"),
        (0, 4, 2, "a chunk of 3 groups does not divide"),
    ],
)
def test_schedule_that_does_not_fit(consumed: int, size: int, align: int, message: str) -> None:
    schedule = ChunkSchedule({0: ((0, 1, 2), (3,))}, "recorded")
    with pytest.raises(DataError, match=f"recorded PPO step 0: .*{message}"):
        schedule.next_chunk(0, consumed, size, align)
