"""Whole runs on real vLLM servers: started by us, placed by Ray, killed in the middle of a step."""

import os
import signal
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from processes import command_line, descendants, wait_for

import lightning_ppo as ppo
from lightning_ppo.rollout.vllm.member import MemberState

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"num_prompts_per_step": 16, "num_generations_per_prompt": 2, "max_response_tokens": 16, "timeout_s": 200.0}
SETTINGS = {"device": "cpu", "kv_cache_bytes": 64 * 1024 * 1024, "start_timeout_s": 240.0, "max_num_seqs": 32}


def build(tmp_path, steps, rollout, vllm, *, reward, ppo_settings=None, callbacks=(), **data):
    module = ppo.PPOModule(str(ROOT / "examples/tiny_policy"), ppo=ppo.PPOConfig(**(ppo_settings or {})))
    rollouts = ppo.RolloutDataModule(
        str(ROOT / "examples/sort.jsonl"),
        reward,
        rollout=ppo.RolloutConfig(**{**SIZES, **rollout}),
        engine="vllm",
        vllm=ppo.VLLMConfig(**{**SETTINGS, **vllm}),
        **data,
    )
    trainer = L.Trainer(
        strategy=ppo.StreamingPPOStrategy(),
        accelerator="cpu",
        max_epochs=steps,
        logger=L.pytorch.loggers.CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    return trainer, module, rollouts


def length_reward(prompt, response):
    return len(response) / 16


class Watch(ppo.PPOCallback):
    """What was trained, and how well the engine's log-probs fit."""

    def __init__(self):
        self.trained, self.metrics = [], []

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.trained.extend(payload.chunk.draws)

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.metrics.append(payload.metrics)


OTHERS: set[int] = set()
"""Processes from before a test: the session's shared server is one of them."""


@pytest.fixture(autouse=True)
def _others():
    OTHERS.clear()
    OTHERS.update(child.pid for child in descendants(lambda child: child.pid))


def family():
    """Command lines of the processes below this one that have to do with vLLM or Ray, and were started by this test."""
    names = ("vllm", "ray::", "raylet", "gcs_server")
    lines = descendants(command_line)
    return {
        child.pid: line
        for child, line in lines.items()
        if child.pid not in OTHERS and any(name in line for name in names)
    }


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_colocated_run_with_a_server_of_ours(tmp_path, monkeypatch):
    # which the server finds as well, and asks for
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    watch = Watch()
    rollout = {"min_groups_for_streaming_train": 16, "colocated": True, "temperature": 0.8}
    settings = {"critic_warmup_steps": 1}
    trainer, module, rollouts = build(
        tmp_path, 3, rollout, {}, reward=length_reward, ppo_settings=settings, callbacks=[watch]
    )
    trainer.fit(module, rollouts)
    assert sorted(watch.trained) == list(range(48))
    # as sampled, temperature included (pitfall 55); float32 on both sides
    assert max(metrics["rollout/sampler_mismatch_max"] for metrics in watch.metrics[1:]) <= 1e-4
    assert all(metrics["rollout/version_age_max"] == 0 for metrics in watch.metrics)
    assert "vllm" not in sys.modules, "the trainer's process must not import vLLM"
    assert family() == {}


class KillServer(Watch):
    """Kills a server's process as soon as the second step has its first chunk."""

    def __init__(self):
        super().__init__()
        self.killed = None
        self.restarts = 0

    def on_chunk_end(self, trainer, pl_module, payload):
        super().on_chunk_end(trainer, pl_module, payload)
        if payload.chunk.ppo_step == 1 and self.killed is None:
            fleet = trainer.datamodule._generators._engine.fleet
            self.killed = fleet.serving()[0].name
            # a guard's command line holds that of its server
            servers = [pid for pid, line in family().items() if "-m vllm.entrypoints" in " ".join(line.split()[:3])]
            os.kill(servers[0], signal.SIGKILL)

    def on_train_end(self, trainer, pl_module):
        fleet = trainer.datamodule._generators._engine.fleet
        # the other server may have finished the run before the dead one is cleared away
        wait_for(lambda: fleet.restarts > 0, "a restart", 60)
        self.restarts = trainer.datamodule._generators._engine.restarts
        self.states = [member.state for member in fleet.members()]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_two_servers_in_ray_one_of_which_is_killed_in_mid_step(tmp_path):
    watch = KillServer()
    rollout = {
        "min_groups_for_streaming_train": 4,
        "max_lookahead_versions": 1,
        "max_response_tokens": 32,
        "reward_workers": 1,
    }
    trainer, module, rollouts = build(
        tmp_path,
        4,
        rollout,
        {"num_servers": 2, "placement": "ray", "probe_interval_s": 1.0},
        reward=length_reward,
        ppo_settings={"importance_correction": "truncated"},
        callbacks=[watch],
        ray=ppo.RayConfig(num_cpus_per_server=0.5, num_cpus_per_reward_worker=0.5),
    )
    trainer.fit(module, rollouts)
    assert trainer.global_step == 4
    assert watch.killed is not None
    assert sorted(watch.trained) == list(range(64)), "every group once"
    assert max(metrics["rollout/policy_age_max"] for metrics in watch.metrics) <= 1
    assert watch.restarts >= 1
    assert MemberState.SERVING in watch.states
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert family() == {}
