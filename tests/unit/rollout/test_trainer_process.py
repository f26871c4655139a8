"""What a run changes about its own process, and puts back."""

import resource

import pytest

import lightning_ppo as ppo
from lightning_ppo.rollout.trainer_process import TrainerProcess


@pytest.fixture
def limits():
    """A limit on open files that may be raised; set again afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(1024, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files():
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_beside_vllm_servers_all_files_may_be_opened_that_the_system_grants(limits):
    low, hard = limits
    process = TrainerProcess.confine(ppo.VLLMConfig(trainer_threads=None))
    assert open_files() == (hard, hard)
    process.release()
    assert open_files() == (low, hard)


def test_beside_the_built_in_engine_the_limit_stays(limits):
    process = TrainerProcess.confine(ppo.LocalEngineConfig(trainer_threads=None))
    assert open_files() == limits
    process.release()
    assert open_files() == limits
