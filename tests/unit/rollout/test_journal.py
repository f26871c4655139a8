import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import CheckpointError, RolloutError
from lightning_ppo.rollout import journal as journal_module
from lightning_ppo.rollout.group_codec import encode_group
from lightning_ppo.rollout.journal import Journal
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.testing import char_tokenizer, make_group

# make_group's prompts have the tokens of "^a=" and row = draw
PROMPTS = PromptSet([{"prompt": "^a="} for _ in range(50)], char_tokenizer(), 8)


@pytest.fixture
def opened() -> Iterator[Callable[..., Journal]]:
    """Open a journal, another one with every call; all are closed at the end."""
    journals: list[Journal] = []

    def make(directory: Path, keep: bool = False) -> Journal:
        journals.append(Journal(directory, "data", keep))
        return journals[-1]

    yield make
    for journal in journals:
        journal.close()
        journal.close()


@pytest.fixture
def write(opened: Callable[..., Journal]) -> Callable[..., Journal]:
    def make(directory: Path, groups: list[tuple[PromptGroup, int]], keep: bool = False) -> Journal:
        journal = opened(directory, keep)
        for group, step in groups:
            journal.append(group, step)
        return journal

    return make


def read(directory: Path, lineage: Any = None) -> list[int]:
    return [group.draw for group in Journal.read(directory, "data", PROMPTS, int, lineage)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_groups_come_back_in_the_order_in_which_they_were_finished(write, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "journal"
    order = [(3, 0), (1, 0), (2, 1), (7, 12), (1, 12)]
    with_payload = [(make_group(draw, size=2, version=step, target_step=step), step) for draw, step in order]
    write(directory, with_payload)
    assert names(directory) == ["step_000000.bin", "step_000001.bin", "step_000012.bin"]
    again = Journal.read(directory, "data", PROMPTS, int)
    assert [encode_group(group) for group in again] == [encode_group(group) for group, _ in with_payload]


def test_no_journal_is_an_empty_one(opened, tmp_path: Path) -> None:
    assert read(tmp_path / "nowhere") == []
    opened(tmp_path / "unused").close()
    assert not (tmp_path / "unused").exists(), "a run that finishes nothing leaves nothing behind"


WRITER = """
import sys, torch
from pathlib import Path
from lightning_ppo.batch import Prompt, PromptGroup, Trajectory
from lightning_ppo.rollout.journal import Journal
prompt = Prompt(0, "^a=", (2, 6, 3), {})
journal = Journal(Path(sys.argv[1]), "data", False)
tokens = torch.arange(200)
for draw in range(10**6):
    row = Trajectory(f"draw{draw}_g0", torch.tensor([2, 6, 3]), tokens, tokens >= 0, -tokens.float(), tokens * 0, 1.0,
                     "stop", "")
    journal.append(PromptGroup(f"draw{draw}", draw, prompt, None, 0, 0, (row,), 0.0), draw // 50)
    if draw == 120:
        print("go", flush=True)
"""


def test_a_writer_killed_in_the_middle_leaves_every_record_it_finished(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            guard.cancel()
            process.kill()
    groups = Journal.read(tmp_path, "data", PROMPTS, lambda draw: 0)
    assert len(groups) > 120
    assert [group.draw for group in groups] == list(range(len(groups)))
    assert groups[-1].trajectories[0].response_ids.tolist() == list(range(200))


def test_a_record_that_was_cut_off_is_left_out_wherever_it_was_cut(write, tmp_path: Path) -> None:
    write(tmp_path, [(make_group(draw), 0) for draw in range(3)])
    path = tmp_path / "step_000000.bin"
    whole = path.read_bytes()
    ends = [len(whole) - 2 * (len(encode_group(make_group(0))) + 12), len(whole)]
    seen = set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        draws = read(tmp_path)
        assert draws == list(range(len(draws)))
        seen.add(len(draws))
        if size >= ends[0]:
            assert len(draws) >= 1
    assert seen == {0, 1, 2, 3}


def test_a_resumed_writer_does_not_append_behind_half_a_record(write, tmp_path: Path) -> None:
    write(tmp_path, [(make_group(0), 4), (make_group(1), 4)])
    path = tmp_path / "step_000004.bin"
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, [(make_group(2), 4), (make_group(3), 3)])
    write(tmp_path, [(make_group(4), 4)])
    assert read(tmp_path) == [0, 3, 2, 4], "writer by writer"
    assert names(tmp_path) == ["step_000003_r1.bin", "step_000004.bin", "step_000004_r1.bin", "step_000004_r2.bin"]


def test_damage_anywhere_but_a_cut_off_end_is_refused_in_one_line(write, tmp_path: Path) -> None:
    write(tmp_path, [(make_group(draw), 0) for draw in range(2)])
    path = tmp_path / "step_000000.bin"
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"damaged|has format") as caught:
            read(tmp_path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("fingerprint", ["other", ""])
def test_another_fingerprint_is_refused(write, tmp_path: Path, fingerprint: str) -> None:
    write(tmp_path, [(make_group(0), 0)])
    with pytest.raises(CheckpointError, match="journal of other prompts"):
        Journal.read(tmp_path, fingerprint, PROMPTS, int)


def test_a_group_of_an_unknown_row_is_refused_with_the_file(write, tmp_path: Path) -> None:
    write(tmp_path, [(make_group(49), 0)])
    fewer = PromptSet([{"prompt": "^a="}], char_tokenizer(), 8)
    with pytest.raises(CheckpointError, match=r"step_000000\.bin: a saved rollout is of row 49, the data set has 1"):
        Journal.read(tmp_path, "data", fewer, int)


def test_trim_deletes_what_a_checkpoint_holds(write, tmp_path: Path) -> None:
    journal = write(tmp_path, [(make_group(step), step) for step in range(4)])
    journal.trim(2)
    assert read(tmp_path) == [2, 3]
    journal.append(make_group(9), 3)
    journal.trim(4)
    assert read(tmp_path) == []
    journal.append(make_group(10), 3)
    assert read(tmp_path) == [10], "a group that comes late starts the file anew"


def test_keep_deletes_nothing(write, opened, tmp_path: Path) -> None:
    journal = write(tmp_path, [(make_group(step), step) for step in range(3)], keep=True)
    journal.trim(3)
    again = opened(tmp_path, keep=True)
    again.fork([make_group(2)], 2, journal.lineage, 2)
    assert read(tmp_path) == [0, 1, 2, 2]


def test_fork_starts_anew_with_what_the_resumed_run_kept(write, opened, tmp_path: Path) -> None:
    first = write(tmp_path, [(make_group(step, version=step), step) for step in range(4)])
    second = opened(tmp_path, keep=False)
    second.fork([make_group(2, version=2)], 2, first.lineage, 2)
    second.append(make_group(5, version=2), 2)
    assert names(tmp_path) == ["step_000002_r1.bin"]
    assert read(tmp_path, first.lineage) == [2, 5], "a second resume from the same checkpoint finds them"


def test_nothing_of_another_branch_is_used(write, opened, tmp_path: Path) -> None:
    first = write(tmp_path, [(make_group(step, version=step), step) for step in range(6)], keep=True)
    second = opened(tmp_path, keep=True)
    second.fork([], 3, first.lineage, 3)
    for step in range(3, 6):
        second.append(make_group(10 + step, version=step), step)
    third = opened(tmp_path, keep=True)
    third.fork([], 4, second.lineage, 4)
    third.append(make_group(24, version=4), 4)
    third.append(make_group(25, version=5), 5)
    assert read(tmp_path, first.lineage) == [0, 1, 2, 3, 4, 5, 13]
    assert read(tmp_path, second.lineage) == [0, 1, 2, 3, 13, 14, 15, 24]
    assert read(tmp_path, third.lineage) == [0, 1, 2, 3, 13, 14, 24, 25]
    # resumed from the first run again: the second one has no part in it
    fourth = opened(tmp_path, keep=True)
    fourth.fork([], 2, second.lineage, 2)
    assert [last for _, last in fourth.lineage] == [2, None]
    assert fourth.lineage[0][0] == first.lineage[0][0]


def test_runs_that_begin_at_once_in_one_folder_share_no_file(opened, tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    for journal, draw in ((first, 0), (second, 10), (first, 1), (second, 11)):
        journal.append(make_group(draw), 0)
    second.append(make_group(12), 1)
    first.append(make_group(2), 1)
    second.append(make_group(13), 2)
    assert names(tmp_path) == [
        "step_000000.bin",
        "step_000000_r1.bin",
        "step_000001.bin",
        "step_000001_r1.bin",
        "step_000002_r1.bin",
    ]
    assert read(tmp_path, first.lineage) == [0, 1, 2]
    assert read(tmp_path, second.lineage) == [10, 11, 12, 13]


def test_of_two_runs_that_resume_at_once_neither_drops_the_others_journal(opened, tmp_path: Path) -> None:
    parent = opened(tmp_path)
    parent.append(make_group(0), 0)
    first, second = opened(tmp_path), opened(tmp_path)
    first.fork([make_group(1, version=1)], 1, parent.lineage, 1)
    second.fork([make_group(2, version=1)], 1, parent.lineage, 1)
    first.append(make_group(3, version=2), 2)
    second.append(make_group(4, version=2), 2)
    assert read(tmp_path, first.lineage) == [1, 3, 2]
    assert read(tmp_path, second.lineage) == [1, 2, 4]
    assert "step_000000.bin" not in names(tmp_path)


def test_groups_of_other_prompts_than_their_draws_are_left_out(write, tmp_path: Path, caplog) -> None:
    wrong = dataclasses.replace(make_group(3), prompt=PROMPTS[4])
    write(tmp_path, [(make_group(2), 0), (wrong, 0), (make_group(5), 0)])
    assert read(tmp_path) == [2, 5]
    assert "1 groups of other prompts than their draws' are left out" in caplog.text


@pytest.mark.parametrize("damage", [False, True])
def test_files_of_runs_that_have_nothing_to_do_with_the_checkpoint_are_in_nobodys_way(
    write, tmp_path: Path, damage: bool
) -> None:
    other = Journal(tmp_path, "other settings", False)
    other.append(make_group(7), 3)
    other.append(make_group(8), 3)
    other.close()
    path = tmp_path / "step_000003.bin"
    if damage:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    journal = write(tmp_path, [(make_group(0), 0)])
    assert read(tmp_path, journal.lineage) == [0]
    with pytest.raises(CheckpointError, match="journal of other prompts"):
        read(tmp_path)


def test_a_checkpoint_without_lineage_takes_nothing_and_starts_its_own(write, opened, tmp_path: Path) -> None:
    write(tmp_path, [(make_group(0), 0)], keep=True)
    assert read(tmp_path, []) == []
    resumed = opened(tmp_path, keep=True)
    resumed.fork([], 3, [], 3)
    resumed.append(make_group(1, version=3), 3)
    resumed.append(make_group(2, version=4), 3)
    assert read(tmp_path, resumed.lineage) == [1, 2]
    assert read(tmp_path, []) == []


class _Full(journal_module.FileIO):
    """Takes half of every second write, as a full device does."""

    writes = 0

    def write(self, data: Any) -> int:
        type(self).writes += 1
        return super().write(data if type(self).writes % 2 else data[: len(data) // 2])


def test_a_full_device_is_an_error_and_leaves_whole_records(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FileIO", _Full)
    journal = write(tmp_path, [(make_group(0), 0)])
    with pytest.raises(RolloutError, match=r"cannot be written .*; free some space, or set journal=False"):
        journal.append(make_group(1), 0)
    assert read(tmp_path) == [0]
    journal.append(make_group(2), 0)
    assert read(tmp_path) == [0, 2]


def test_a_directory_that_cannot_be_made_is_an_error(write, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RolloutError, match="cannot be written"):
        write(tmp_path / "file" / "journal", [(make_group(0), 0)])


def test_the_newest_version_is_that_of_generated_tokens() -> None:
    group = make_group(0, size=2, version=3)
    row = dataclasses.replace(
        group.trajectories[1],
        policy_versions=torch.tensor([3, 4, 9]),
        response_mask=torch.tensor([True, True, False]),
    )
    assert group.newest_version == 3
    assert dataclasses.replace(group, trajectories=(group.trajectories[0], row)).newest_version == 4
    empty = dataclasses.replace(row, response_mask=torch.zeros(3, dtype=torch.bool))
    assert dataclasses.replace(group, trajectories=(empty,), start_version=7).newest_version == 7
