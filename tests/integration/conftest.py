"""Histories of training runs that are killed and resumed, in children of one `killed_runs.py`."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore = ["killed_runs.py"]
"""A script."""


def read_lines(path: Path) -> list[Any]:
    """Rows of a file of JSON lines; a kill may have left none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class History:
    """One training with its kills: every run goes on from the newest checkpoint on disk."""

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], int], job: dict[str, Any]) -> None:
        self.folder, self._send, self.job = folder, send, job
        self.runs: list[tuple[str, int]] = []
        """Name of every run, and the step that it began with."""
        folder.mkdir(parents=True)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return (completed steps, file) of every checkpoint, oldest first."""
        found = (self.folder / "saved").glob("*.ckpt")
        return sorted((torch.load(path, weights_only=True)["global_step"], path) for path in found)

    def run(self, **changes: Any) -> int:
        """Train, and return the exit code; negative: the signal that killed it."""
        step, path = self.checkpoints()[-1] if self.runs and self.checkpoints() else (0, None)
        name = f"run{len(self.runs)}"
        self.runs.append((name, step))
        resume = None if path is None else str(path)
        job = {"folder": str(self.folder), "name": name, "resume": resume, "start": step}
        return self._send({**self.job, **job, **changes})

    def steps(self, run: int) -> list[dict[str, Any]]:
        """Return what a run wrote down about each step that it completed."""
        return read_lines(self.folder / f"{self.runs[run][0]}.steps")

    def survivors(self) -> list[dict[str, Any]]:
        """Return the steps that count: those of a run up to the checkpoint that the next one resumed from."""
        kept: list[dict[str, Any]] = []
        for run, (_, start) in enumerate(self.runs):
            kept = [row for row in kept if row["step"] < start] + self.steps(run)
        return kept

    def requested(self, run: int) -> list[int]:
        """Return the draw of every request that a run's engine got."""
        return [draw for draw, _, _ in read_lines(self.folder / f"{self.runs[run][0]}.requests")]

    def end(self) -> dict[str, Any]:
        """Return ledger and buffer of the last run."""
        return json.loads((self.folder / f"{self.runs[-1][0]}.end").read_text())

    def output(self) -> str:
        """Return the end of what the last run wrote to the terminal."""
        return (self.folder / f"{self.runs[-1][0]}.output").read_text(errors="replace")[-3000:]


@pytest.fixture(scope="session")
def begin_history(policy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., History]]:
    """Begin a history: `begin_history(steps=5, every=2, rollout={...})`; see `killed_runs.py` for the settings."""
    script = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), policy_folder]
    process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def send(job: dict[str, Any]) -> int:
        stdin.write(json.dumps(job) + "\n")
        return int(stdout.readline())

    def begin(**job: Any) -> History:
        return History(tmp_path_factory.mktemp("history") / "run", send, {"steps": 5, "every": 2, **job})

    yield begin
    stdin.close()
    process.wait(60)
    stdout.close()
