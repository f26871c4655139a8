"""Whatever goes wrong: the error says what and where, nothing is half done, the last checkpoint is the resume point."""

import asyncio
import math
import re

import pytest
import torch
from draws import draw_of
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_ppo as ppo
from lightning_ppo.errors import (
    CheckpointError,
    DataError,
    EngineDiedError,
    EngineError,
    RewardError,
    RolloutError,
    StepError,
)
from lightning_ppo.testing import FakeEngine

HOOKS = (
    "on_chunk_ready",
    "on_chunk_end",
    "on_rollout_batch_complete",
    "on_before_policy_step",
    "on_policy_update_end",
    "on_before_refit",
    "on_refit_end",
    "on_critic_epoch_end",
    "on_ppo_step_end",
)


class Boom(RuntimeError):
    pass


def fails_in(hook, step, action):
    """A callback that does something in a hook of one PPO step."""

    def method(self, trainer, pl_module, *_):
        if trainer.current_epoch == step:
            action(trainer, pl_module)

    return type("FailsIn", (ppo.PPOCallback,), {hook: method})()


def boom(trainer, pl_module):
    raise Boom("boom")


class Boundary(ppo.PPOCallback):
    """Keeps the weights as they were after the last complete step."""

    weights = None

    def on_train_start(self, trainer, pl_module):
        self._keep(pl_module)

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self._keep(pl_module)

    def _keep(self, pl_module):
        self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}


def differing(first, second):
    return [name for name in first if not torch.equal(first[name], second[name])]


def assert_closed(run):
    """Both updates are dropped, the engine is closed, and the trainer knows that it was interrupted."""
    assert run.fake.closed
    assert run.trainer.interrupted
    assert not run.module.policy_update.accumulator.is_open
    assert not run.module.critic_update.accumulator.is_open
    assert all(parameter.grad is None for parameter in run.module.parameters())


# ---------------------------------------------------------------- rewards


async def failing_later(prompt, response):
    await asyncio.sleep(0)
    raise Boom("no service")


def raising(prompt, response):
    raise Boom("no such answer")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (raising, "failed: Boom: no such answer"),
        (failing_later, "failed: Boom: no service"),
        (lambda prompt, response: math.nan, "it returned nan, not a finite number"),
        (lambda prompt, response: -math.inf, "it returned -inf, not a finite number"),
        (lambda prompt, response: "0.5", "it returned str, not a finite number"),
        (lambda prompt, response: None, "it returned NoneType, not a finite number"),
        (lambda prompt, response: torch.zeros(2), "it returned Tensor, not a finite number"),
    ],
)
def test_bad_reward_names_the_prompt_and_updates_nothing(make_run, reward, says):
    run = make_run(2, reward=reward, prompts=[{"prompt": "^ab="}])
    before = run.weights()
    with pytest.raises(RewardError) as caught:
        run.fit()
    message = str(caught.value)
    assert says in message
    assert message.endswith("(prompt row 0, counted from 0: '^ab=')")
    assert "\n" not in message
    assert differing(before, run.weights()) == []
    assert run.trainer.global_step == 0
    assert_closed(run)


def test_reward_that_fails_in_a_later_step_leaves_the_boundary(make_run, cut):
    calls = []

    def reward(prompt, response):
        calls.append(prompt)
        if len(calls) > 12:
            raise Boom("quota")
        return len(response) / 8

    boundary = Boundary()
    # lookahead 0: the first chunk of step 1 is trained before the failing reward is asked for
    rollout = {**cut(2, 2), "max_inflight_prompts": 2}
    run = make_run(3, reward=reward, rollout=rollout, callbacks=[boundary])
    with pytest.raises(RewardError, match="quota"):
        run.fit()
    assert run.trainer.global_step == 1
    assert differing(boundary.weights, run.weights()) == []
    assert_closed(run)


def test_reward_that_fails_in_validation(make_run):
    def reward(prompt, response):
        return math.nan if prompt == "^zz=" else 0.5

    run = make_run(1, reward=reward, validation_prompts=[{"prompt": "^zz="}])
    with pytest.raises(RewardError, match="zz="):
        run.fit()
    assert run.fake.closed


# ---------------------------------------------------------------- engines


def test_engine_that_dies_inside_a_step(make_run, cut):
    """Pitfall 82: no zero-reward row is made up for a response that never came."""
    fake = FakeEngine(holds=lambda request: draw_of(request) == 7)
    boundary = Boundary()
    die = fails_in("on_chunk_end", 1, lambda trainer, module: fake.die("CUDA out of memory"))
    run = make_run(3, rollout=cut(3, 1), fake=fake, callbacks=[boundary, die])
    with pytest.raises(EngineDiedError, match="CUDA out of memory"):
        run.fit()
    assert run.trainer.global_step == 1
    assert differing(boundary.weights, run.weights()) == []
    assert_closed(run)


def test_engine_that_refuses_a_request(make_run):
    fake = FakeEngine(fails=lambda request: EngineError("prompt too long") if draw_of(request) == 5 else None)
    run = make_run(3, fake=fake)
    with pytest.raises(EngineError, match="prompt too long"):
        run.fit()
    assert run.trainer.global_step == 1
    assert_closed(run)


def test_engine_that_dies_while_the_critic_trains(make_run):
    run = make_run(3)
    run.trainer.callbacks.append(fails_in("on_critic_epoch_end", 1, lambda *_: run.fake.die("killed")))
    with pytest.raises(EngineDiedError, match="killed"):
        run.fit()
    # the step itself needed the engine no more
    assert run.trainer.global_step == 2
    assert_closed(run)


def test_engine_that_hangs_is_named_with_what_is_in_flight(make_run):
    fake = FakeEngine(holds=lambda request: draw_of(request) in (1, 2))
    run = make_run(1, rollout={"timeout_s": 0.4}, fake=fake, prompts=[{"prompt": f"^{c}="} for c in "abcd"])
    before = run.weights()
    with pytest.raises(RolloutError) as caught:
        run.fit()
    message = str(caught.value)
    assert message.startswith("no prompt group was finished for timeout_s=0.4; in flight: 2 [draw 1 (row ")
    assert "ready 2" in message
    assert "\n" not in message
    assert differing(before, run.weights()) == []
    assert_closed(run)


def test_engine_that_hangs_in_validation(make_run):
    fake = FakeEngine(holds=lambda request: not request.request_id.startswith("draw"))
    run = make_run(1, rollout={"timeout_s": 0.4}, fake=fake, validation_prompts=[{"prompt": "^a="}])
    with pytest.raises(RolloutError, match=r"^no validation response was finished for timeout_s=0\.4; 0 of 1 are,"):
        run.fit()
    assert_closed(run)


# ---------------------------------------------------------------- numbers that are no numbers


def poison(name):
    def action(trainer, pl_module):
        with torch.no_grad():
            next(p for n, p in pl_module.named_parameters() if n.startswith(name) and p.dim() > 1).view(-1)[-1] = (
                math.nan
            )

    return action


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("model", "hook", "says"),
    [
        ("policy.model.lm_head", "on_chunk_ready", "policy loss is nan in PPO step 1 chunk 0, samples "),
        ("critic.model.score", "on_chunk_ready", "PPO step 1 chunk 0"),
        ("critic.model.score", "on_refit_end", "critic loss is nan in critic epoch 0 of PPO step 1, samples "),
    ],
)
def test_nan_weight_fails_the_step_and_keeps_the_last_checkpoint(make_run, cut, tmp_path, model, hook, says):
    def saver():
        return ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=1)

    boundary = Boundary()
    run = make_run(
        3,
        rollout=cut(2, 2),
        callbacks=[boundary, fails_in(hook, 1, poison(model)), saver()],
        enable_checkpointing=True,
    )
    with pytest.raises(StepError) as caught:
        run.fit()
    message = str(caught.value)
    assert says in message
    assert "draw4_g0" in message
    assert run.trainer.global_step == 1
    assert_closed(run)
    changed = differing(boundary.weights, run.weights())
    if hook == "on_chunk_ready":
        # nothing but what we poisoned
        assert len(changed) == 1
        assert changed[0].startswith(model)
    assert all(name.startswith(("policy.model", model)) for name in changed)
    (path,) = (tmp_path / "saved").iterdir()
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert differing(boundary.weights, saved) == []
    resumed = make_run(3, rollout=cut(2, 2), callbacks=[saver()], enable_checkpointing=True)
    resumed.fit(path)
    straight = make_run(3, rollout=cut(2, 2))
    straight.fit()
    assert differing(resumed.weights(), straight.weights()) == []


@pytest.mark.parametrize(
    ("model", "hook", "where"),
    [
        ("policy", "on_before_policy_step", "the update of PPO step 1"),
        ("critic", "on_refit_end", "the epochs of PPO step 1"),
    ],
)
def test_diverged_model_reaches_neither_generators_nor_checkpoints(make_run, cut, tmp_path, model, hook, where):
    """Far too high a rate leaves finite weights, whose products are not: the engine would be the one to notice."""

    def leap(trainer, pl_module):
        for group in pl_module.optimizer(model).param_groups:
            group["lr"] = 1e15

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=1)
    run = make_run(3, rollout=cut(2, 2), callbacks=[fails_in(hook, 1, leap), saver], enable_checkpointing=True)
    with pytest.raises(StepError) as caught:
        run.fit()
    message = str(caught.value)
    assert message.startswith(f"the {model} has diverged: what it gives to sample draw")
    assert message.endswith(f"is not finite after {where}; lower the learning rate of model.{model}_optimizer")
    assert all(torch.isfinite(tensor).all() for tensor in run.weights().values())
    assert run.fake.versions == ([0, 1] if model == "policy" else [0, 1, 2])
    (path,) = (tmp_path / "saved").iterdir()
    assert torch.load(path, weights_only=True)["global_step"] == 1
    assert_closed(run)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("model", "where"), [("policy", "PPO step 0 chunk 1"), ("critic", "critic epoch 0 of PPO step 0")]
)
def test_bad_gradient_of_a_finite_loss(make_run, cut, model, where, value):
    """Only the backward pass goes wrong; the chunk and its samples are named."""

    class Overflow(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            if payload.chunk.index == 1:
                weight = getattr(pl_module, model).model.get_input_embeddings().weight
                weight.register_hook(lambda grad: torch.full_like(grad, value))

    run = make_run(2, rollout=cut(2, 2), callbacks=[Overflow()])
    before = run.weights()
    with pytest.raises(StepError) as caught:
        run.fit()
    message = str(caught.value)
    assert message.startswith(f"{model} gradient is not finite after {where}, samples draw")
    if model == "policy":
        assert "draw2_g0" in message
        assert "draw0_g0" not in message
        assert differing(before, run.weights()) == []
    assert not differing(
        {n: t for n, t in before.items() if n.startswith("critic")},
        {n: t for n, t in run.weights().items() if n.startswith("critic")},
    )
    assert run.trainer.global_step == 0
    assert_closed(run)


# ---------------------------------------------------------------- masked steps


@pytest.mark.parametrize("chunks", [(4,), (2, 2)])
@pytest.mark.parametrize("warmup", [0, 1])
def test_wholly_masked_step_fails_before_either_update(make_run, cut, chunks, warmup):
    done = []
    hooks = {hook: lambda self, *_, hook=hook: done.append(hook) for hook in HOOKS}
    run = make_run(
        2,
        rollout=cut(*chunks),
        ppo_settings={"truncated_responses": "mask", "critic_warmup_steps": warmup},
        fake=FakeEngine(length=8),
        callbacks=[type("Record", (ppo.PPOCallback,), hooks)()],
    )
    before = run.weights()
    with pytest.raises(StepError) as caught:
        run.fit()
    assert str(caught.value) == "PPO step 0 has no trained token (all 8 responses are masked); nothing was updated"
    assert differing(before, run.weights()) == []
    assert set(done) == {"on_chunk_ready", "on_chunk_end"}
    assert run.fake.versions == [0]
    assert run.trainer.global_step == 0
    assert_closed(run)


@pytest.mark.parametrize("masked", [(0, 1), (2, 3)])
@pytest.mark.parametrize("normalize", ["running", "batch", "chunk", "off"])
def test_masked_chunk_inside_a_step_trains_the_rest(make_run, cut, masked, normalize):
    """The first or the last chunk has no valid token; the step is that of the other chunk alone."""
    batches = []

    class Keep(ppo.PPOCallback):
        def on_ppo_step_end(self, trainer, pl_module, payload):
            batches.append(payload)

    fake = FakeEngine(length=lambda request: 8 if draw_of(request) in masked else 3)
    settings = {"truncated_responses": "mask", "normalize_advantages": normalize}
    run = make_run(1, rollout=cut(2, 2), ppo_settings=settings, fake=fake, callbacks=[Keep()])
    before = run.weights()
    run.fit()
    (done,) = batches
    assert (done.batch.num_tokens, done.batch.num_sequences) == (12, 4)
    assert all(math.isfinite(value) for value in done.metrics.values())
    changed = differing(before, run.weights())
    assert any(name.startswith("policy.model") for name in changed)
    assert any(name.startswith("critic.model") for name in changed)


# ---------------------------------------------------------------- hooks


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_that_raises_leaves_nothing_open(make_run, cut, tmp_path, hook):
    path = tmp_path / "asked.ckpt"

    def save_and_raise(trainer, pl_module):
        trainer.save_checkpoint(path)
        raise Boom("boom")

    run = make_run(3, rollout=cut(2, 2), callbacks=[fails_in(hook, 1, save_and_raise)])
    with pytest.raises(Boom):
        run.fit()
    assert_closed(run)
    is_complete = hook == "on_ppo_step_end"
    assert run.trainer.global_step == (2 if is_complete else 1)
    assert int(run.module.policy.completed_steps) == int(run.module.critic.completed_steps) == run.trainer.global_step
    # a save inside the step was deferred, and then dropped with it
    assert path.exists() == is_complete


@pytest.mark.parametrize("hook", ["on_chunk_end", "on_before_policy_step", "on_refit_end"])
def test_fit_again_after_a_failure(make_run, cut, tmp_path, hook):
    """The same trainer and module, from the last checkpoint: as if nothing had happened."""
    path = tmp_path / "one.ckpt"
    failing = fails_in(hook, 1, boom)
    save = fails_in("on_train_epoch_end", 0, lambda trainer, module: trainer.save_checkpoint(path))
    run = make_run(3, rollout=cut(2, 2), callbacks=[save, failing])
    with pytest.raises(Boom):
        run.fit()
    run.trainer.callbacks.remove(failing)
    run.fit(path)
    assert run.trainer.global_step == 3
    straight = make_run(3, rollout=cut(2, 2))
    straight.fit()
    assert differing(run.weights(), straight.weights()) == []


def test_failing_critic_after_the_refit_moves_no_counter(make_run):
    """The weights are out already, but the step does not count: its prompts are drawn again after a resume."""

    class Fails(ppo.CriticEpochs):
        def train(self, trainer, pl_module, batch):
            if batch.ppo_step == 1:
                raise Boom("critic")
            return super().train(trainer, pl_module, batch)

    run = make_run(3, callbacks=[Fails()])
    states = []
    run.trainer.callbacks.append(
        type("Look", (ppo.PPOCallback,), {"on_exception": lambda self, *_: states.append(run.data.position())})()
    )
    with pytest.raises(Boom, match="critic"):
        run.fit()
    assert run.trainer.global_step == 1
    assert run.fake.versions == [0, 1, 2]
    assert int(run.module.policy.completed_steps) == int(run.module.critic.completed_steps) == 1
    assert states[0]["stream"]["cursor"] == 4
    assert_closed(run)
    # the policy has stepped on these rows; another pass over them would not be the same step
    with pytest.raises(CheckpointError, match=r"^PPO step 1 failed after an update[^\n]*; resume with ckpt_path="):
        run.fit()


def test_a_warm_up_step_that_failed_after_the_refit_is_not_trained_on(make_run):
    """No model has changed, but the generators serve the next version: every later step would be one version off."""

    class Fails(ppo.CriticEpochs):
        def train(self, trainer, pl_module, batch):
            raise Boom("critic")

    run = make_run(3, callbacks=[Fails()], ppo_settings={"critic_warmup_steps": 2})
    with pytest.raises(Boom, match="critic"):
        run.fit()
    assert (run.trainer.global_step, run.module.policy_version) == (0, 1)
    with pytest.raises(CheckpointError, match=r"^PPO step 0 failed after an update[^\n]*; resume with ckpt_path="):
        run.fit()


def test_a_step_whose_updates_are_all_skipped_fails(make_run, cut):
    bounds = {"importance_correction": "icepop", "importance_clip_min": 1.0, "importance_clip_max": 1.0}
    run = make_run(1, rollout=cut(4), ppo_settings={"ppo_epochs": 2, "policy_minibatches": 2, **bounds})
    before = run.weights()
    with pytest.raises(StepError, match=r"^no policy update of PPO step 0 had a trained token of importance weight"):
        run.fit()
    assert differing(before, run.weights()) == []
    assert_closed(run)


# ---------------------------------------------------------------- prompts


def test_prompts_that_are_all_too_long(make_run):
    run = make_run(1, prompts=[{"prompt": "a" * 60}, {"prompt": "b" * 60}])
    with pytest.raises(DataError) as caught:
        run.fit()
    message = str(caught.value)
    assert "row 0" in message
    assert "prompt has 60 tokens, max_prompt_tokens=56" in message
    assert "\n" not in message
    assert run.fake.spec is None


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "no rows"),
        ([{"prompt": "^a="}, {"text": "^b="}], "row 1"),
        ([{"prompt": "^a="}, {"prompt": ""}], "row 1"),
        ([{"prompt": [2, 6, 999]}], "token 999"),
        ([{"prompt": "^a="}, {"prompt": 7}], "row 1"),
        ({"prompt": ["^a="]}, "dict maps columns"),
    ],
)
@pytest.mark.parametrize("which", ["prompts", "validation_prompts"])
def test_bad_rows_are_named_before_anything_starts(make_run, prompts, says, which):
    run = make_run(1, **{which: prompts})
    with pytest.raises(DataError, match=rf"^{which}\W.*{says}") as caught:
        run.fit()
    # once
    assert len(re.findall(r"prompts\b", str(caught.value))) == 1
    assert "\n" not in str(caught.value)
    assert run.fake.spec is None
