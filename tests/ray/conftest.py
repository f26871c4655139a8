"""One local Ray for all tests of this folder."""

from collections.abc import Iterator

import pytest

from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.runtime import RayRuntime


@pytest.fixture(scope="package")
def runtime() -> Iterator[RayRuntime]:
    """A local Ray of two CPUs; the tests of other folders start their own, as users do."""
    started = RayRuntime(RayConfig(num_cpus_per_reward_worker=0.25), num_cpus=2)
    started.start()
    yield started
    started.close()
