"""One local Ray for all tests of this folder."""

import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.runtime import RayRuntime


@pytest.fixture(scope="session")
def runtime() -> Iterator[RayRuntime]:
    """A local Ray of two CPUs."""
    started = RayRuntime(RayConfig(num_cpus_per_reward_worker=0.25), num_cpus=2)
    started.start()
    yield started
    started.close()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition, for at most 30 s: `wait_until(condition, what)`."""

    def wait(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
            time.sleep(0.1)

    return wait


@pytest.fixture
def is_gone() -> Callable[[int], bool]:
    """Whether no process of this number runs; a zombie does not."""

    def look(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return look
