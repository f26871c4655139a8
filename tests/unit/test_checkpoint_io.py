"""Checkpoint files are whole or not there."""

from pathlib import Path

import pytest

from lightning_ppo.checkpoint_io import WholeCheckpointIO


def test_the_file_is_written_beside_its_target(tmp_path, monkeypatch):
    """A temporary folder on another file system would make the last move a copy, which a kill can tear."""
    moved = []
    monkeypatch.setattr("os.replace", lambda source, target: moved.append((Path(source), Path(target))))
    WholeCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "new" / "a.ckpt")
    assert moved == [(tmp_path / "new" / ".a.ckpt.part", tmp_path / "new" / "a.ckpt")]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path, files = tmp_path / "a.ckpt", WholeCheckpointIO()
    files.save_checkpoint({"a": 1}, path)
    with pytest.raises(AttributeError, match="local object"):
        files.save_checkpoint({"a": 2, "b": lambda: None}, f"file://{path}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert files.load_checkpoint(path, weights_only=True) == {"a": 1}
