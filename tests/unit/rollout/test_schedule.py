import dataclasses
from pathlib import Path

import pytest

from lightning_ppo.errors import DataError, RolloutError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.run_header import RunHeader
from lightning_ppo.rollout.schedule import ChunkSchedule, Schedule


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
    path.write_text(f'{{"ppo_step": 0, "chunks": [[0]]}}\n{line}\n{{"ppo_step": 3, "chunks": [[9]]}}\n')
    with pytest.raises(DataError, match=r"schedule\.jsonl line 2: [^\n]*$"):
        ChunkSchedule.load(path)


def header(ppo_step: int = 0) -> RunHeader:
    plain = RunHeader.of(RolloutConfig(), seed=0, prompts="abc", stop_token_ids=(1,), warmup_steps=0)
    return dataclasses.replace(plain, ppo_step=ppo_step)


def test_line_that_a_kill_cut_off_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "run" / "schedule.jsonl"
    ChunkSchedule.start(path, header())
    ChunkSchedule.append(path, 0, [(0, 1)])
    size = path.stat().st_size
    ChunkSchedule.append(path, 1, [(2, 3)])
    whole = path.read_bytes()
    for end in range(size, len(whole) + 1):
        path.write_bytes(whole[:end])
        ends = list(Schedule.load(path).steps)
        assert ends == ([0, 1] if end >= len(whole) - 1 else [0])
        ChunkSchedule.start(path, header(1))
        ChunkSchedule.append(path, 1, [(4,), (5,)])
        again = Schedule.load(path)
        assert [head.ppo_step for head in again.headers] == [0, 1]
        assert {step: record.chunks for step, record in again.steps.items()} == {0: ((0, 1),), 1: ((4,), (5,))}


def test_two_kills_in_a_row_leave_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    for _ in range(2):
        ChunkSchedule.start(path, header())
        path.write_bytes(path.read_bytes()[:-9])
    ChunkSchedule.start(path, header())
    ChunkSchedule.append(path, 0, [(0, 1)])
    assert list(Schedule.load(path).steps) == [0]


@pytest.mark.parametrize("name", ["", "file/schedule.jsonl"])
def test_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    message = r"^schedule=[^\n]* cannot be written \([^\n]*; free some space, or make it writable$"
    with pytest.raises(RolloutError, match=message):
        ChunkSchedule.append(tmp_path / name, 0, [(0,)])
    with pytest.raises(RolloutError, match=message):
        ChunkSchedule.start(tmp_path / name, header())


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
