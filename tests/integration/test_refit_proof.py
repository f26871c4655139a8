"""The proof of a refit, with an engine whose log-probs are those of the weights that it was sent, in float32."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import lightning_ppo as ppo
from lightning_ppo.errors import EngineError, RolloutError
from lightning_ppo.testing import FakeEngine


class ScoringEngine(FakeEngine):
    """Answers probes with what a server in float32 would: the log-probs of its weights."""

    def __init__(self, folder, shift=0.0):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.proved = []
        self._shift = shift

    @torch.no_grad()
    async def probe(self, request):
        (answer,) = (await super().probe(request)).values()
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.weights)
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        start = len(request.prompt_ids)
        logits = model(ids).logits[0, start - 1 : -1] / request.sampling.temperature
        found = torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0] + self._shift
        self.proved.append(self.version)
        return {"scoring": replace(answer, logprobs=tuple(found.tolist()))}


@pytest.fixture
def proving_run(make_run, policy_folder, monkeypatch):
    """Build a run whose refits are proved as those of vLLM in float32."""
    monkeypatch.setattr(ppo.RolloutDataModule, "refit_tolerance", 1e-3)

    def build(steps=2, shift=0.0, **settings):
        return make_run(steps, fake=ScoringEngine(policy_folder, shift), **settings)

    return build


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_precision_of_training_is_not_that_of_the_proof(precision, proving_run):
    run = proving_run(precision=precision)
    run.fit()
    assert run.fake.proved == [0, 1, 2]


def test_other_weights_are_found(proving_run):
    run = proving_run(shift=0.002, precision="bf16-mixed")
    with pytest.raises(EngineError, match=r"scoring differs by 0.002 in a log-prob"):
        run.fit()


def test_a_proof_that_takes_too_long_says_how_the_engine_is(proving_run, monkeypatch):
    async def hang(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(ScoringEngine, "probe", hang)
    monkeypatch.setattr(ScoringEngine, "describe", lambda self: "server_0 starting")
    run = proving_run(rollout={"timeout_s": 0.3})
    with pytest.raises(
        RolloutError, match=r"^probe responses of server_0 starting were not finished within timeout_s="
    ):
        run.fit()
