"""Without lookahead an overlapped run trains exactly what a synchronous one trains."""

import asyncio
import threading

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.testing import FakeEngine

STEPS = 5
ON_POLICY = {"max_lookahead_versions": 0, "max_trajectory_age_steps": 0}
# whitening over the whole step and several critic updates would both show a difference in rows or in their order
PPO = {"normalize_advantages": "batch", "critic_minibatches": 2}


def leaves(value, path=""):
    """Every tensor and number of nested containers, by its path."""
    if isinstance(value, dict):
        return {name: leaf for key in value for name, leaf in leaves(value[key], f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {name: leaf for i, item in enumerate(value) for name, leaf in leaves(item, f"{path}/{i}").items()}
    return {path: value}


def learned(run):
    """All parameters of both models, and what their optimizers hold."""
    optimizers = {name: run.module.optimizer(name).state_dict() for name in ("policy", "critic")}
    return leaves({"weights": run.weights(), "optimizers": optimizers})


def first_difference(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        if not same:
            return name
    return None


@pytest.fixture
def train(make_run):
    """Train with the built-in engine; the reward prefers letters, so that the policy moves."""

    def run(steps=STEPS, *, slots=16, rollout=None, **settings):
        engine = LocalEngine(LocalEngineConfig(slots=slots))
        built = make_run(steps, fake=engine, rollout={**ON_POLICY, **(rollout or {})}, ppo_settings=PPO, **settings)
        built.fit()
        return built

    return run


@pytest.mark.slow
def test_overlapped_training_is_synchronous_training_bit_for_bit(train, make_run):
    """Pitfall 91: age 0 and lookahead 0; both models and both optimizers after 5 PPO steps."""
    synchronous = train(rollout={"colocated": True})
    overlapped = train()
    assert first_difference(learned(synchronous), learned(overlapped)) is None
    # otherwise equal would mean little
    untrained = make_run().weights()
    moved = [name for name, value in overlapped.weights().items() if not torch.equal(value, untrained[name])]
    assert {name.split(".")[0] for name in moved} == {"policy", "critic"}


@pytest.mark.slow
def test_streamed_training_repeats_itself_on_its_own_chunks(train, tmp_path):
    """Chunk boundaries are all that timing decides here, also if fewer responses are generated at once."""
    streaming = {"min_groups_for_streaming_train": 1}

    async def slow_count_letters(prompt, response):
        await asyncio.sleep(0.01 * len(response))
        return sum(character.isalpha() for character in response) / 8

    first = train(rollout=streaming, logger=CSVLogger(tmp_path))
    chunks = f"{first.trainer.log_dir}/schedule.jsonl"
    again = train(slots=3, reward=slow_count_letters, rollout={**streaming, "replay_chunks": chunks})
    assert first_difference(learned(first), learned(again)) is None


class LetGo(ppo.PPOCallback):
    """Answers held requests about when the weights change for the first time."""

    def __init__(self, engine, drains):
        self.engine, self.drains, self.versions = engine, drains, []

    def on_before_refit(self, trainer, pl_module, payload):
        if payload.policy_version == 1 and self.drains:
            # the refit has to wait for it
            threading.Timer(0.05, self.engine.let_go).start()

    def on_refit_end(self, trainer, pl_module, payload):
        if payload.policy_version == 1 and not self.drains:
            self.engine.let_go()

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.versions += [set(row.policy_versions.tolist()) for row in payload.chunk.rows]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_drained_response_ends_on_the_version_that_it_started_with(make_run, in_flight):
    """Pitfall 85: a response of step 1 is being generated when step 0 has been trained."""
    engine = FakeEngine(length=6, holds=lambda request: request.request_id == "draw4_g0")
    watch = LetGo(engine, drains=not in_flight)
    run = make_run(
        3,
        fake=engine,
        rollout={
            "max_lookahead_versions": 1,
            "max_trajectory_age_steps": 1,
            "in_flight_weight_updates": in_flight,
        },
        ppo_settings={"importance_correction": "truncated", "normalize_advantages": "off"},
        callbacks=[watch],
    )
    run.fit()
    assert len(watch.versions) == 3 * 4 * 2
    assert [versions for versions in watch.versions if len(versions) > 1] == [{0, 1}] * in_flight
