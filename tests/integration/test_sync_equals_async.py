"""Without lookahead an overlapped run trains exactly what a synchronous one trains."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig

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
def test_overlapped_training_is_synchronous_training_bit_for_bit(train):
    """Pitfall 91: age 0 and lookahead 0; both models and both optimizers after 5 PPO steps."""
    synchronous = train(rollout={"colocated": True})
    start = {name: value for name, value in learned(train(1)).items() if torch.is_tensor(value)}
    overlapped = train()
    assert first_difference(learned(synchronous), learned(overlapped)) is None
    # otherwise equal would mean little
    assert not torch.equal(
        start["/weights/policy.model.lm_head.weight"], overlapped.weights()["policy.model.lm_head.weight"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("slots", [3, 16])
def test_streamed_training_repeats_itself_on_its_own_chunks(train, tmp_path, slots):
    """Chunk boundaries are all that timing decides here, also if fewer responses are generated at once."""
    streaming = {"min_groups_for_streaming_train": 1}

    async def slow(prompt, response):
        return sum(character.isalpha() for character in response) / 8

    first = train(rollout=streaming, logger=CSVLogger(tmp_path))
    chunks = f"{first.trainer.log_dir}/schedule.jsonl"
    again = train(slots=slots, reward=slow, rollout={**streaming, "replay_chunks": chunks})
    assert first_difference(learned(first), learned(again)) is None


def test_versions_do_not_change_within_a_drained_response(make_run):
    """Pitfall 85: without in-flight updates a response ends on the version that it started with."""
    from lightning_ppo.callbacks import PPOCallback
    from lightning_ppo.testing import FakeEngine

    seen = []

    class Watch(PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            seen.extend(set(row.policy_versions.tolist()) for row in payload.chunk.rows)

    ahead = {
        "max_lookahead_versions": 1,
        "max_trajectory_age_steps": 1,
        "min_groups_for_streaming_train": 1,
        "max_inflight_prompts": 3,
    }
    settings = {"ppo_settings": {"importance_correction": "truncated", "normalize_advantages": "off"}}
    for in_flight in (False, True):
        seen.clear()
        engine = FakeEngine(delay_s=lambda request: 0.002 * (request.seed % 9), length=6)
        rollout = {**ahead, "in_flight_weight_updates": in_flight}
        make_run(6, fake=engine, rollout=rollout, callbacks=[Watch()], **settings).fit()
        assert any(len(versions) > 1 for versions in seen) is in_flight
