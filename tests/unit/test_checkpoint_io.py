"""Checkpoint files are whole or not there."""

import os
from pathlib import Path

import pytest

from lightning_ppo.checkpoint import KEY, not_a_file
from lightning_ppo.checkpoint_io import WholeCheckpointIO


def test_the_file_is_written_beside_its_target(tmp_path, monkeypatch):
    """A temporary folder on another file system would make the last move a copy, which a kill can tear."""
    moved = []
    monkeypatch.setattr("os.replace", lambda source, target: moved.append((Path(source), Path(target))))
    WholeCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "new" / "a.ckpt")
    assert moved == [(tmp_path / "new" / ".a.ckpt.part", tmp_path / "new" / "a.ckpt")]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path, files = tmp_path / "a.ckpt", WholeCheckpointIO()
    content = {KEY: {}, "state_dict": {}, "global_step": 1}
    files.save_checkpoint(content, path)
    with pytest.raises(AttributeError, match="local object"):
        files.save_checkpoint({"a": 2, "b": lambda: None}, f"file://{path}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert files.load_checkpoint(path, weights_only=True) == content


def test_the_newest_checkpoint_of_a_folder_is_named(tmp_path):
    assert str(not_a_file(tmp_path)) == f"ckpt_path={tmp_path} is a folder; give the path of a checkpoint"
    (tmp_path / "checkpoints").mkdir()
    for name, age in (("b", 2), ("c", 1), ("a", 3)):
        path = tmp_path / "checkpoints" / f"{name}.ckpt"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    assert str(not_a_file(tmp_path)).endswith(f" is a folder; give a file of it, such as {tmp_path}/checkpoints/c.ckpt")
    (tmp_path / "checkpoints/last.ckpt").symlink_to("c.ckpt")
    # a link whose file is gone
    (tmp_path / "checkpoints/old.ckpt").symlink_to("gone.ckpt")
    assert str(not_a_file(tmp_path / "checkpoints")).endswith(f" such as {tmp_path}/checkpoints/last.ckpt")
