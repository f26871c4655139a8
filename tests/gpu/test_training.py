"""Training on a GPU computes what it computes on the host, and leaves nothing there."""

from functools import partial

import pytest
import torch

import lightning_ppo as ppo
from lightning_ppo.testing import FakeEngine

VARIANTS = {
    "default": {},
    "whitened": {"normalize_advantages": "batch"},
    "by chunk": {"normalize_advantages": "chunk"},
    "kl in the loss": {"kl_placement": "loss", "kl_coef": 0.1, "entropy_coef": 0.01},
    "kl in the reward": {"kl_placement": "reward", "kl_coef": 0.1},
    "sequence level": {"loss_level": "sequence"},
    "importance": {"importance_correction": "truncated"},
    "warm-up": {"critic_warmup_steps": 1, "critic_ppo_epochs": 2},
    "epochs": {"ppo_epochs": 2, "policy_minibatches": 2, "critic_ppo_epochs": 2, "critic_minibatches": 2},
}
OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


CRUMBS = 1024
"""Bytes of a step's last metrics, which nobody needs to clear."""


def assert_same_weights(run, other):
    expected = other.weights()
    for name, tensor in run.weights().items():
        torch.testing.assert_close(tensor.cpu(), expected[name].cpu(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_it_trains_what_the_host_trains(make_run, on_gpu, gpu, cut, settings):
    rollout = cut(4) if "ppo_epochs" in settings else cut(2, 1, 1)
    expected = make_run(3, ppo_settings=settings, rollout=rollout)
    expected.fit()
    before = gpu.num_bytes()
    run = on_gpu(3, ppo_settings=settings, rollout=rollout)
    run.fit()
    assert_same_weights(run, expected)
    assert gpu.num_bytes() <= before + CRUMBS


class Occupancy(ppo.PPOCallback):
    """Bytes on the GPU at the end of every policy update and of every step."""

    def __init__(self, gpu):
        self.gpu, self.found = gpu, []

    def on_fit_start(self, trainer, pl_module):
        self.before = self.gpu.num_bytes()

    def on_policy_update_end(self, trainer, pl_module, payload):
        self.found.append(self.gpu.num_bytes() - self.before)

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.found.append(self.gpu.num_bytes() - self.before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_goes_on_there(on_gpu, gpu, cut, tmp_path, optimizer):
    def make(steps, *callbacks):
        module = {"policy_optimizer": optimizer, "critic_optimizer": optimizer}
        return on_gpu(steps, module=module, rollout=cut(2, 1, 1), callbacks=list(callbacks))

    whole = make(4)
    whole.fit()
    first = make(2)
    first.fit()
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    occupied = [Occupancy(gpu), Occupancy(gpu)]
    second = make(4, occupied[0])
    second.fit(tmp_path / "half.ckpt")
    for name, tensor in second.weights().items():
        torch.testing.assert_close(tensor, whole.weights()[name], rtol=0, atol=0, msg=name)
    uninterrupted = make(4, occupied[1])
    uninterrupted.fit()
    assert max(occupied[0].found) <= max(occupied[1].found) + CRUMBS


def test_one_model_at_a_time_is_there(on_gpu, gpu, cut):
    watch = Occupancy(gpu)
    run = on_gpu(2, rollout=cut(2, 1, 1), callbacks=[watch])
    run.fit()
    policy, critic = (
        4 * sum(p.numel() for p in model.parameters()) for model in (run.module.policy, run.module.critic)
    )
    assert policy > critic
    # weights, and two moments once it was trained, of the one that is there; gradients of both stay where they are
    for found in watch.found:
        assert policy + critic < found <= 4 * policy + critic + 4 * CRUMBS


class Neighbour(FakeEngine):
    """An engine on the same GPU: what it finds there when it comes back."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.found = gpu, []

    def wake(self):
        self.found.append(self.gpu.num_bytes())
        super().wake()

    def update_weights(self, weights, version):
        pairs = list(weights)
        if version > 0:
            self.found.append(self.gpu.num_bytes())
        super().update_weights(pairs, version)


def test_a_colocated_engine_finds_it_empty(on_gpu, gpu, cut):
    engine = Neighbour(gpu)
    before = gpu.num_bytes()
    on_gpu(2, fake=engine, rollout={**cut(4), "colocated": True}).fit()
    assert len(engine.found) == 4
    assert max(engine.found) <= before + 2 * CRUMBS


def test_validation_and_prediction(on_gpu, gpu, tmp_path):
    prompts = [{"prompt": "^AB="}, {"prompt": "^BA="}]
    run = on_gpu(2, validation_prompts=prompts, check_val_every_n_epoch=1)
    before = gpu.num_bytes()
    run.fit()
    run.trainer.validate(run.module, run.data)
    run.trainer.predict(run.module, run.data)
    assert gpu.num_bytes() <= before + CRUMBS


def test_mixed_precision(on_gpu):
    run = on_gpu(2, precision="bf16-mixed")
    run.fit()
    assert all(tensor.isfinite().all() for tensor in run.weights().values())
