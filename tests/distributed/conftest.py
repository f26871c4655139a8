"""Starts `two_ranks.py` in a process of its own, and loads `runs.py` for the same runs on one process."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

collect_ignore = ["two_ranks.py"]
"""A script: it finds `runs` next to it only when it is run as one."""
SCRIPT = Path(__file__).with_name("two_ranks.py")
HEALTHY = (
    "checkpointed,resumed,running,batch,regularized,one_response,ragged,unequal,masked_share,minibatches,evaluated,"
    "heartbeat,sigterm_0,sigterm_1,non_finite,plain"
)
"""All in one pair of processes, each of which needs seconds to import everything."""
DEADLINE_S = 240.0
FROM_OUTSIDE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")


@dataclass
class Pair:
    """Two ranks: the process that was started, and the one that it started."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    loaded: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def wait(self) -> int:
        """Wait for both ranks to be gone; return the exit code of rank 0."""
        code = self.process.wait(DEADLINE_S)
        self.until(lambda: not is_alive(self.pid(1)), "rank 1 is an orphan")
        return code

    def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait, but not for ever."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline, f"{what}\n{self.output()}"
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        """Process id of a rank; rank 1 may still be importing."""
        path = self.folder / f"pid_{rank}"
        self.until(lambda: path.exists() and path.read_text() != "", f"rank {rank} has not started")
        return int(path.read_text())

    def error(self, rank: int) -> str:
        """What a rank ended with."""
        return (self.folder / f"error_{rank}").read_text()

    def output(self) -> str:
        """The end of what both ranks wrote to the terminal."""
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def seen(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What a rank saw in an action."""
        if (name, rank) not in self.loaded:
            self.loaded[name, rank] = torch.load(self.folder / f"{name}_{rank}.pt", weights_only=False)
        return self.loaded[name, rank]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended but was not collected by its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def runs() -> ModuleType:
    """Test modules cannot import each other by name."""
    spec = importlib.util.spec_from_file_location("distributed_runs", SCRIPT.with_name("runs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distributed_runs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def start(policy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Start two ranks that do the named actions; whatever still runs at the end of the session is killed."""
    started: list[Pair] = []

    def launch(names: str) -> Pair:
        folder = tmp_path_factory.mktemp("two_ranks")
        # Lightning then asks the system for a free port, a new one for every pair
        env = {name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE}
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), names, str(folder), policy_folder],
                env={**env, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(Pair(process, folder))
        return started[-1]

    yield launch
    for pair in started:
        path = pair.folder / "pid_1"
        if pair.process.poll() is None:
            pair.process.kill()
            pair.process.wait()
        if path.exists() and is_alive(int(path.read_text())):
            psutil.Process(int(path.read_text())).kill()


@pytest.fixture(scope="session")
def pair(start: Callable[[str], Pair]) -> Pair:
    """Two ranks that did everything that is meant to go well."""
    pair = start(HEALTHY)
    code = pair.wait()
    assert code == 0, pair.output()
    return pair
