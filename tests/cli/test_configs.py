"""Every file in configs/ parses, builds, and passes the set-up checks, also where this machine could not run it."""

import os
from pathlib import Path

import pytest

from lightning_ppo.checks import check_algorithm
from lightning_ppo.cli import PPOCLI
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.vllm.config import VLLMConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    # the parser exports it
    monkeypatch.setenv("PL_GLOBAL_SEED", os.environ.get("PL_GLOBAL_SEED", "0"))

    def build(name, *overrides):
        here = ["--trainer.accelerator=cpu", "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path}"]
        return PPOCLI(["fit", f"--config=configs/{name}", *here, "--trainer.precision=32-true", *overrides])

    return build


@pytest.mark.parametrize("name", CONFIGS)
def test_builds_and_passes_the_checks(load, name):
    cli = load(name)
    ppo, rollout = cli.model.ppo, cli.datamodule.rollout
    check_algorithm(ppo, rollout)
    need = make_sampler(rollout, ppo.critic_warmup_steps).required_capacity(rollout.num_prompts_per_step)
    assert rollout.buffer_capacity >= need


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith(("vllm", "ray"))])
def test_vllm_configs_generate_with_vllm(load, name):
    data = load(name).datamodule
    assert isinstance(data.engine_config, VLLMConfig)
    assert (data.engine_config.placement == "ray") == (name == "ray_cluster.yaml")


def test_every_config_says_how_it_is_run():
    for name in CONFIGS:
        first = (ROOT / "configs" / name).read_text().splitlines()[0]
        assert f"lightning-ppo fit --config configs/{name}" in first
