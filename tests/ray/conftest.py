"""A local Ray for each file of this folder."""

from collections.abc import Iterator

import pytest

from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.runtime import RayRuntime


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    """A local Ray of two CPUs. Tests of other folders must not find it: they start their own, as users do."""
    started = RayRuntime(RayConfig(num_cpus_per_reward_worker=0.25), num_cpus=2)
    started.start()
    yield started
    started.close()
