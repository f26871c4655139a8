"""Histories of runs that are killed and resumed, in children of one `killed_runs.py`; and a checkpoint to resume."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ppo as ppo
from lightning_ppo.testing import FakeEngine

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
    """Begin a history: `begin_history(steps=4, every=2, rollout={...})`; see `killed_runs.py` for the settings."""
    script = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), policy_folder]
    process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    assert stdout.readline() == "ready\n"

    def send(job: dict[str, Any]) -> int:
        stdin.write(json.dumps(job) + "\n")
        return int(stdout.readline())

    def begin(**job: Any) -> History:
        return History(tmp_path_factory.mktemp("history") / "run", send, {"steps": 4, "every": 2, **job})

    yield begin
    stdin.close()
    process.wait(60)
    stdout.close()


# ---------------------------------------------------------------- runs in this process

TWO_AHEAD = {
    "rollout": {"max_lookahead_versions": 2, "max_trajectory_age_steps": 2},
    "ppo_settings": {"importance_correction": "truncated"},
}


class Steps(ppo.PPOCallback):
    """Draws and policy age of every completed step."""

    def __init__(self) -> None:
        self.draws: dict[int, list[int]] = {}
        self.ages: list[float] = []

    def on_ppo_step_end(self, trainer: Any, pl_module: Any, payload: Any) -> None:
        ids = {row.trajectory.sample_id for row in payload.batch.rows}
        self.draws[payload.ppo_step - 1] = sorted({int(name.split("_")[0][4:]) for name in ids})
        self.ages.append(payload.metrics["rollout/policy_age_max"])


class SaveWhen(ppo.PPOCallback):
    """Saves after `steps` steps, as soon as the checkpoint would hold `ready` finished groups."""

    def __init__(self, path: Path, steps: int, ready: int = 0) -> None:
        self.path, self.steps, self.ready = path, steps, ready

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != self.steps:
            return
        deadline = time.monotonic() + 20
        while pl_module.rollouts.position()["rollouts"]["num_ready"] < self.ready:
            assert time.monotonic() < deadline, pl_module.rollouts.position()["rollouts"]
            time.sleep(0.005)
        trainer.save_checkpoint(self.path)


def check_each_once(run: Any, steps: Steps, already: Iterable[int]) -> None:
    """Nothing twice and nothing lost: what was trained and what the buffer holds are all draws up to the last."""
    trained = [draw for draws in steps.draws.values() for draw in draws]
    held = run.data.position()["rollouts"]["draws"]
    everything = sorted([*already, *trained, *held])
    assert everything == list(range(len(everything)))


@pytest.fixture
def steps() -> Steps:
    """Build a callback that keeps what every step trained."""
    return Steps()


@pytest.fixture
def save_when() -> type[SaveWhen]:
    """Give the callback that saves once there is enough to save."""
    return SaveWhen


@pytest.fixture
def assert_each_once() -> Callable[..., None]:
    """Give `check_each_once`."""
    return check_each_once


@pytest.fixture
def checkpoint(make_run: Callable[..., Any], tmp_path: Path) -> Path:
    """After two steps; of steps 2 to 4, draw 9 lacks a response, draw 17 both, and step 3 is complete."""
    path = tmp_path / "two.ckpt"
    missing = ("draw9_g1", "draw17_g0", "draw17_g1")
    fake = FakeEngine(holds=lambda request: request.request_id in missing)
    first = make_run(2, **TWO_AHEAD, fake=fake, callbacks=[SaveWhen(path, 2, ready=10)])
    first.fit()
    saved = torch.load(path, weights_only=True)["lightning_ppo"]["prompts"]["rollouts"]
    assert (saved["num_ready"], saved["draws"][10:]) == (10, [9, 17])
    return path
