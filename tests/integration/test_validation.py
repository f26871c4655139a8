"""Validation and prediction: greedy, while rollouts run, and without a trace in training."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_ppo.errors import CheckpointError, ConfigError, DataError
from lightning_ppo.testing import FakeEngine, make_prompt

VALIDATION = [{"prompt": "^ab=", "answer": "a"}, {"prompt": "^cd=", "answer": "b"}, {"prompt": "^ef=", "answer": "c"}]


def reward(prompt, response):
    return len(response) / 8


def is_training(request):
    return request.request_id.startswith("draw")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_sanity_check_comes_before_the_first_refit_and_rollout(make_run):
    seen = []

    class Look(Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            seen.append((list(run.fake.versions), len(run.fake.requests)))

        def on_sanity_check_end(self, trainer, pl_module):
            seen.append((list(run.fake.versions), len(run.fake.requests)))

    run = make_run(1, validation_prompts=VALIDATION, num_sanity_val_steps=2, callbacks=[Look()])
    run.fit()
    assert seen == [([0], 0), ([0], 3)]
    assert not any(is_training(request) for request in run.fake.requests[:3])
    assert run.trainer.global_step == 1


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])])
def test_validation_every_n_ppo_steps(make_run, cut, every, expected):
    steps = []

    class Look(Callback):
        def on_validation_end(self, trainer, pl_module):
            steps.append(trainer.global_step)

    run = make_run(
        4, rollout=cut(2, 1, 1), validation_prompts=VALIDATION, check_val_every_n_epoch=every, callbacks=[Look()]
    )
    run.fit()
    assert steps == expected


def test_validation_runs_while_rollouts_are_in_flight(make_run):
    """The next step's responses are all held until validation is over: neither waits for the other."""
    fake = FakeEngine(holds=lambda request: is_training(request) and int(request.request_id[4]) >= 4)
    in_flight = []

    class Look(Callback):
        def on_validation_end(self, trainer, pl_module):
            in_flight.append({name.split("_")[0] for name in fake.held})

    run = make_run(1, fake=fake, validation_prompts=VALIDATION, callbacks=[Look()])
    run.fit()
    assert in_flight == [{"draw4", "draw5", "draw6", "draw7"}]
    assert run.trainer.callback_metrics["val/reward_mean"] > 0


@pytest.mark.parametrize("settings", [{}, {"critic_warmup_steps": 1, "critic_minibatches": 2}, {"ppo_epochs": 2}])
@pytest.mark.parametrize("chunks", [(4,), (2, 2)])
def test_validation_leaves_no_trace_in_training(make_run, cut, settings, chunks):
    """Accumulated gradients, seeds and the buffer are as without it: the weights are equal bit for bit."""
    if "ppo_epochs" in settings and len(chunks) > 1:
        settings = {"critic_ppo_epochs": 2}
    arguments = {"rollout": cut(*chunks), "ppo_settings": settings}
    without = make_run(3, **arguments)
    without.fit()
    with_it = make_run(3, validation_prompts=VALIDATION, num_sanity_val_steps=2, **arguments)
    with_it.fit()
    assert same(without.weights(), with_it.weights())
    trained = [[r for r in run.fake.requests if is_training(r)] for run in (without, with_it)]
    assert len(with_it.fake.requests) == len(trained[1]) + 3 * 4
    seeds = [{request.request_id: request.seed for request in requests} for requests in trained]
    assert all(seeds[0][name] == seed for name, seed in seeds[1].items() if name in seeds[0])


def test_validation_requests_are_greedy_and_have_seeds_of_their_own(make_run):
    run = make_run(2, validation_prompts=VALIDATION)
    run.fit()
    greedy = [request for request in run.fake.requests if not is_training(request)]
    assert len(greedy) == 6
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in greedy} == {(0.0, 1.0, 0)}
    # every validation asks for the same
    assert [r.seed for r in greedy[:3]] == [r.seed for r in greedy[3:]]
    assert not {r.seed for r in greedy} & {r.seed for r in run.fake.requests if is_training(r)}
    assert {r.sampling.temperature for r in run.fake.requests if is_training(r)} == {1.0}


def test_validation_sampling_can_be_set(make_run):
    rollout = {"validation_temperature": 0.7, "validation_top_p": 0.9, "validation_top_k": 5}
    run = make_run(1, validation_prompts=VALIDATION, rollout=rollout)
    run.trainer.validate(run.module, run.data, verbose=False)
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in run.fake.requests} == {(0.7, 0.9, 5)}


def test_metrics_of_validate_without_fit(make_run):
    fake = FakeEngine(length=lambda request: 8 if request.prompt_ids[1] == 6 else 4)
    run = make_run(1, validation_prompts=VALIDATION, reward=reward, fake=fake)
    (metrics,) = run.trainer.validate(run.module, run.data, verbose=False)
    (rows,) = run.trainer.predict(run.module, run.data)
    assert metrics["val/response_length"] == pytest.approx(16 / 3)
    assert metrics["val/truncated_fraction"] == pytest.approx(1 / 3)
    assert 0 < metrics["val/reward_mean"] <= 1
    assert len(rows) == 3
    assert run.fake.versions[0] == 0


def test_validation_metrics_are_means_over_prompts(make_run, monkeypatch):
    """Also when the prompts come in batches of different sizes."""
    monkeypatch.setattr("lightning_ppo.rollout.datamodule.VALIDATION_BATCH", 2)
    fake = FakeEngine(length=lambda request: 2 if request.prompt_ids[1] == 10 else 5)
    run = make_run(1, validation_prompts=VALIDATION, fake=fake)
    (metrics,) = run.trainer.validate(run.module, run.data, verbose=False)
    assert metrics["val/response_length"] == pytest.approx(4.0)


@pytest.mark.parametrize("what", ["validate", "predict"])
def test_checkpoint_is_what_the_engine_serves(make_run, tmp_path, what):
    run = make_run(2)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    trained = run.module.policy.model.state_dict()
    fresh = make_run(1, validation_prompts=VALIDATION)
    evaluate = getattr(fresh.trainer, what)
    evaluate(fresh.module, fresh.data, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert same(fresh.fake.weights, dict(trained))
    assert fresh.fake.versions == [2]
    assert {request.request_id.startswith("draw") for request in fresh.fake.requests} == {False}


def test_torn_checkpoint_is_refused_by_validate(make_run, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del saved["state_dict"]["policy.completed_steps"]
    torch.save(saved, tmp_path / "torn.ckpt")
    fresh = make_run(1, validation_prompts=VALIDATION)
    with pytest.raises(CheckpointError, match=r"checkpoint 1, policy None, critic 1"):
        fresh.trainer.validate(fresh.module, fresh.data, ckpt_path=tmp_path / "torn.ckpt", weights_only=True)
    assert fresh.fake.spec is None


def test_predict_rows(make_run):
    run = make_run(1, validation_prompts=VALIDATION, reward=reward, fake=FakeEngine(length=4))
    (rows,) = run.trainer.predict(run.module, run.data)
    assert [(row["prompt"], row["answer"]) for row in rows] == [("^ab=", "a"), ("^cd=", "b"), ("^ef=", "c")]
    for row in rows:
        assert set(row) == {
            "prompt",
            "response",
            "reward",
            "finish_reason",
            "response_ids",
            "logprobs",
            "answer",
        }
        assert row["finish_reason"] == "stop"
        assert len(row["response_ids"]) == len(row["logprobs"]) == 4
        assert row["reward"] == len(row["response"]) / 8
    assert all(type(value) in (str, float, list) for row in rows for value in row.values())


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("where", ["prompts", "validation_prompts"])
def test_engine_gets_the_room_that_the_longest_request_needs(make_run, where, length):
    """Not the policy's context: key-value caches are allocated for it, and most models' is enormous."""
    prompts = {"prompts": VALIDATION, "validation_prompts": VALIDATION[:1]}
    prompts[where] = [*prompts[where], {"prompt": "^" * length}]
    run = make_run(1, **prompts, num_sanity_val_steps=1)
    run.fit()
    assert run.fake.spec.max_context_tokens == max(length, 4) + 8
    longest = max(len(request.prompt_ids) + request.sampling.max_tokens for request in run.fake.requests)
    assert longest <= run.fake.spec.max_context_tokens


def test_longest_prompt_may_fill_the_policys_context(make_run):
    run = make_run(1, prompts=[{"prompt": "^" * 56}])
    run.fit()
    assert run.fake.spec.max_context_tokens == 64


def test_prompt_that_the_engine_has_no_room_for_is_refused(make_run):
    class Ask(Callback):
        def on_validation_end(self, trainer, pl_module):
            pl_module.rollouts.sample([make_prompt(row=7, token_ids=(2,) * 4)], namespace="side")
            pl_module.rollouts.sample([make_prompt(row=7, token_ids=(2,) * 5)], namespace="side")

    run = make_run(1, validation_prompts=VALIDATION, callbacks=[Ask()])
    with pytest.raises(DataError, match=r"^the prompt of row 7 has 5 tokens, the engine has room for the 4 of the "):
        run.trainer.validate(run.module, run.data, verbose=False)
    assert len(run.fake.requests) == 3 + 1


def test_fit_without_validation_prompts_validates_nothing(make_run):
    run = make_run(1, num_sanity_val_steps=2)
    run.fit()
    assert all(is_training(request) for request in run.fake.requests)


@pytest.mark.parametrize("what", ["validate", "predict"])
def test_evaluation_needs_prompts(make_run, what):
    run = make_run(1)
    with pytest.raises(ConfigError, match=r"^validation_prompts=None leaves nothing to \w+; give "):
        getattr(run.trainer, what)(run.module, run.data)
    assert run.fake.spec is None
