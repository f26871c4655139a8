"""Runs of the command line, and the scalars that they logged."""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class FinishedRun:
    """One finished run."""

    wall_s: float
    """Of the whole command."""
    scalars: dict[str, list[float]]
    """Values of every metric, in the order in which they were logged."""


def fit(config: str, seed: int, overrides: list[str]) -> FinishedRun:
    """Run `lightning-ppo fit` once, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "lightning_ppo.cli", "fit", f"--config=configs/{config}.yaml"]
        command += [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}", *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - start
        (events,) = Path(folder).rglob("events.out.tfevents.*")
        log = EventAccumulator(str(events), size_guidance={"scalars": 0})
        log.Reload()
        names = log.Tags()["scalars"]
        return FinishedRun(wall_s, {name: [event.value for event in log.Scalars(name)] for name in names})
