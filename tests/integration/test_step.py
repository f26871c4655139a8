"""What a PPO step computes, how often, on which model, and what it says about it."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from draws import draw_of
from transformers import AutoModelForCausalLM

import lightning_ppo as ppo
from lightning_ppo.algorithms import kl_estimate
from lightning_ppo.testing import FakeEngine, char_tokenizer
from lightning_ppo.timing import PhaseTimer
from lightning_ppo.updates.advantage_stage import AdvantageStage

FAST = {"policy_optimizer": partial(torch.optim.AdamW, lr=2e-2, weight_decay=0.0)}
SGD = {
    "policy_optimizer": partial(torch.optim.SGD, lr=0.5),
    "critic_optimizer": partial(torch.optim.SGD, lr=0.5),
}


class Watch(ppo.PPOCallback):
    """Keeps batches and metrics of every step, and counts optimizer steps and forward rows."""

    def __init__(self):
        self.batches, self.metrics, self.policy_stats = [], [], []
        self.optimizer_steps = Counter()
        self.grad_norms = []
        self.forward_rows = Counter()
        self.residency = None

    def on_train_start(self, trainer, pl_module):
        self.residency = trainer.strategy.residency
        models = {"policy": pl_module.policy, "critic": pl_module.critic, "reference": pl_module.reference}
        for name, model in models.items():
            if model is not None:
                model.register_forward_hook(partial(self._count, name))

    def _count(self, name, model, arguments, output):
        self.forward_rows[name, torch.is_grad_enabled()] += len(arguments[0].indices)
        # whoever computes must be on the device
        assert self.residency.resident == name

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        name = "policy" if optimizer is pl_module.optimizer("policy") else "critic"
        self.optimizer_steps[name] += 1
        grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        self.grad_norms.append((name, float(torch.cat(grads).norm())))

    def on_rollout_batch_complete(self, trainer, pl_module, payload):
        self.batches.append(payload.batch)

    def on_policy_update_end(self, trainer, pl_module, payload):
        self.policy_stats.append(payload.stats)

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.metrics.append(payload.metrics)


def fit(make_run, steps=1, **arguments):
    watch = Watch()
    run = make_run(steps, callbacks=[watch, *arguments.pop("callbacks", ())], **arguments)
    run.fit()
    return run, watch


# ---------------------------------------------------------------- how often


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 1), (2, 3)])
def test_optimizer_steps_of_the_critic(make_run, cut, epochs, minibatches):
    settings = {"critic_ppo_epochs": epochs, "critic_minibatches": minibatches}
    _, watch = fit(make_run, 2, rollout=cut(2, 1, 1), ppo_settings=settings)
    assert watch.optimizer_steps == {"policy": 2, "critic": 2 * epochs * minibatches}


@pytest.mark.parametrize(("epochs", "minibatches"), [(3, 1), (1, 4), (2, 2)])
def test_optimizer_steps_of_the_policy(make_run, epochs, minibatches):
    _, watch = fit(make_run, 2, ppo_settings={"ppo_epochs": epochs, "policy_minibatches": minibatches})
    assert watch.optimizer_steps == {"policy": 2 * epochs * minibatches, "critic": 2}


@pytest.mark.parametrize("seed", [2**32 - 1, 20240101])
def test_a_large_seed_shuffles_as_well(make_run, seed):
    settings = {"critic_minibatches": 2, "policy_minibatches": 2}
    run, _ = fit(make_run, 2, rollout={"seed": seed}, ppo_settings=settings)
    assert run.trainer.global_step == 2


def test_the_logged_rates_are_those_of_the_step(make_run):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda tick: 1.0 / (1 + tick))
    module = SGD | {"policy_scheduler": schedule, "critic_scheduler": schedule}
    _, watch = fit(make_run, 3, ppo_settings={"critic_warmup_steps": 1}, module=module)
    assert [metrics["critic/lr"] for metrics in watch.metrics] == pytest.approx([0.5, 0.25, 0.5 / 3])
    # in warm-up the policy is not trained, and its schedule waits
    assert [metrics["policy/lr"] for metrics in watch.metrics] == pytest.approx([0.5, 0.5, 0.25])


def test_one_forward_per_row_in_a_streaming_step(make_run, cut):
    """The training forward is the old-log-prob forward; values are computed once per sample.

    One row more, after each update, tells whether the model has diverged.
    """
    _, watch = fit(make_run, 2, rollout=cut(2, 1, 1), ppo_settings={"critic_ppo_epochs": 3})
    assert watch.forward_rows == {
        ("policy", False): 2,
        ("policy", True): 16,
        ("critic", False): 16 + 2,
        ("critic", True): 48,
    }


def test_one_extra_forward_per_row_with_several_policy_epochs(make_run):
    _, watch = fit(make_run, ppo_settings={"ppo_epochs": 2})
    assert watch.forward_rows == {
        ("policy", False): 8 + 1,
        ("policy", True): 16,
        ("critic", False): 8 + 1,
        ("critic", True): 8,
    }


def test_no_policy_forward_in_warmup(make_run, cut):
    _, watch = fit(make_run, 2, rollout=cut(2, 2), ppo_settings={"critic_warmup_steps": 2})
    assert watch.forward_rows == {("critic", False): 16 + 2, ("critic", True): 16}


@pytest.mark.parametrize("budget", [16, 10_000])
def test_micro_batches_do_not_change_the_step(make_run, budget):
    """Rows are batched under a token budget; sums make the result independent of it."""
    first, _ = fit(make_run, 2, ppo_settings={"micro_batch_tokens": budget}, module=SGD)
    second, _ = fit(make_run, 2, ppo_settings={"micro_batch_tokens": 64}, module=SGD)
    for name, tensor in first.weights().items():
        torch.testing.assert_close(tensor, second.weights()[name], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("normalize", ["running", "batch", "off"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_streamed_run_equals_a_full_batch_run(make_run, cut, normalize, level):
    settings = {"normalize_advantages": normalize, "loss_level": level, "critic_ppo_epochs": 2}
    full, _ = fit(make_run, 3, ppo_settings=settings, module=SGD)
    streamed, watch = fit(make_run, 3, ppo_settings=settings, module=SGD, rollout=cut(1, 2, 1))
    assert [metrics["step/chunks"] for metrics in watch.metrics] == [3, 3, 3]
    for name, tensor in full.weights().items():
        torch.testing.assert_close(streamed.weights()[name], tensor, rtol=1e-4, atol=2e-6)


def test_a_streamed_step_is_centred_on_the_means_of_the_steps_before(make_run, cut):
    """`normalize_advantages: running`: nothing before the first step, then the decayed means without their bias."""
    centres = []

    class Centre(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            centres.append(pl_module._ppo_step().normalizer.running.centre)

    settings = {"normalize_advantages": "running", "running_mean_decay": 0.5}
    _, watch = fit(
        make_run,
        3,
        rollout=cut(2, 2),
        ppo_settings=settings,
        callbacks=[Centre()],
        reward=lambda prompt, response: 5.0 + len(response),
    )
    first, second, _ = (metrics["advantage/mean"] for metrics in watch.metrics)
    expected = [0.0, first, (0.25 * first + 0.5 * second) / 0.75]
    assert first > 1
    assert centres == pytest.approx([centre for centre in expected for _ in range(2)], rel=1e-6)


def test_slow_responses_make_a_chunk_of_their_own(make_run):
    fake = FakeEngine(holds=lambda request: draw_of(request) >= 2)

    class LetGo(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            fake.let_go()

    chunks = {"min_groups_for_streaming_train": 2}
    _, watch = fit(make_run, 1, rollout=chunks, fake=fake, callbacks=[LetGo()])
    assert watch.metrics[0]["step/chunks"] == 2
    assert [row.trajectory.sample_id for row in watch.batches[0].rows] == [
        f"draw{draw}_g{index}" for draw in range(4) for index in range(2)
    ]


def test_log_lines(make_run, cut, caplog):
    caplog.set_level(logging.INFO, logger="lightning_ppo")
    fit(make_run, 2, rollout=cut(2, 1, 1))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("train_pump")]
    assert lines == [
        line
        for step in range(2)
        for line in (
            f"train_pump: step {step} chunk 0: 2 group(s), 2/4 dispatched",
            f"train_pump: step {step} chunk 1: 1 group(s), 3/4 dispatched",
            f"train_pump: step {step} chunk 2: 1 group(s), 4/4 dispatched",
            f"train_pump: step {step} closing on 3 chunk(s), 4 group(s)",
        )
    ]


def test_values_are_those_of_the_unchanged_critic(make_run, cut):
    """Old values of every chunk come from the critic as it was before the step, streamed or not."""
    values = []
    for rollout in ({}, cut(1, 1, 1, 1)):
        watch = Watch()
        run = make_run(1, rollout=rollout, callbacks=[watch])
        torch.manual_seed(1)
        torch.nn.init.normal_(run.module.critic.model.score.weight)
        run.fit()
        values.append({row.trajectory.sample_id: row.values for row in watch.batches[0].rows})
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-4, atol=1e-5)
        assert value.any()


# ---------------------------------------------------------------- ratios, clipping


def test_ratios_move_and_clip_in_later_epochs(make_run):
    _, watch = fit(make_run, ppo_settings={"ppo_epochs": 3}, module=FAST)
    first, *later = watch.policy_stats[0]
    assert first.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert first.approx_kl == pytest.approx(0.0, abs=1e-6)
    assert first.clip_fraction == 0.0
    assert all(abs(stats.ratio_mean - 1.0) > 1e-3 and abs(stats.approx_kl) > 1e-3 for stats in later)
    assert any(stats.clip_fraction > 0 for stats in later)


@pytest.mark.parametrize("normalize", ["running", "batch"])
def test_ratios_are_one_in_a_streaming_step(make_run, cut, normalize):
    """Also where a second backward pass of other advantages is made."""
    settings = {"normalize_advantages": normalize}
    _, watch = fit(make_run, 2, rollout=cut(2, 1, 1), ppo_settings=settings, module=FAST)
    for (stats,) in watch.policy_stats:
        assert stats.ratio_mean == pytest.approx(1.0, abs=1e-6)
        assert (stats.approx_kl, stats.clip_fraction) == (0.0, 0.0)


@pytest.mark.parametrize("chunks", [(4,), (2, 2)])
def test_old_logprobs_from_the_rollout(make_run, cut, chunks):
    """The engine's numbers are the ratio's denominator; the fake engine's are far off, so that ratios clip."""
    settings = {"old_logprobs": "rollout", "normalize_advantages": "off"}
    _, watch = fit(make_run, rollout=cut(*chunks), ppo_settings=settings)
    for row in watch.batches[0].rows:
        assert row.old_logprobs is row.trajectory.rollout_logprobs
    (stats,) = watch.policy_stats[0]
    assert stats.ratio_mean < 0.5
    assert watch.forward_rows["policy", False] == 1, "one row after the update"


@pytest.mark.parametrize("critic_norm", [None, 1e-3])
def test_each_model_has_its_own_gradient_norm(make_run, cut, critic_norm):
    settings = {"max_grad_norm": 1e-2, "max_critic_grad_norm": critic_norm}
    _, watch = fit(make_run, 2, rollout=cut(2, 2), ppo_settings=settings)
    norms = {name: [norm for who, norm in watch.grad_norms if who == name] for name in ("policy", "critic")}
    assert norms["policy"] == pytest.approx([1e-2, 1e-2], rel=1e-4)
    before = [metrics["critic/grad_norm"] for metrics in watch.metrics]
    assert all(norm > 1e-2 for norm in before)
    assert norms["critic"] == pytest.approx(before if critic_norm is None else [critic_norm] * 2, rel=1e-4)


# ---------------------------------------------------------------- reference policy, entropy


@pytest.fixture
def other_policy(policy_folder, tmp_path):
    """The policy, with some noise on it."""
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "other")
    char_tokenizer().save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_in_the_reward(make_run, other_policy, kind):
    settings = {"kl_placement": "reward", "kl_coef": 0.25, "kl_type": kind, "ppo_epochs": 2}
    _, watch = fit(make_run, ppo_settings=settings, module={"reference": other_policy})
    charged = []
    for row in watch.batches[0].rows:
        kl = kl_estimate(row.old_logprobs, row.ref_logprobs, kind)
        charged.append(float(kl.sum()))
        assert float(row.returns[0]) == pytest.approx(row.trajectory.reward - 0.25 * charged[-1], abs=1e-4)
    assert max(map(abs, charged)) > 1e-3
    assert watch.forward_rows["reference", False] == 8


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_reference_is_as_hot_as_the_policy(make_run, policy_folder, temperature):
    """Pitfall 55: log-probs of two temperatures differ although the weights do not."""
    settings = {"kl_placement": "reward", "kl_coef": 0.25, "kl_type": "k1", "ppo_epochs": 2}
    rollout = {"temperature": temperature}
    _, watch = fit(make_run, ppo_settings=settings, rollout=rollout, module={"reference": policy_folder})
    for row in watch.batches[0].rows:
        torch.testing.assert_close(row.ref_logprobs, row.old_logprobs, rtol=0, atol=1e-5)
        assert row.returns.tolist() == pytest.approx([row.trajectory.reward] * len(row.returns), abs=1e-4)


def test_kl_in_the_loss_pulls_towards_the_reference(make_run, other_policy):
    settings = {"kl_placement": "loss", "kl_coef": 1.0, "ppo_epochs": 2}
    _, watch = fit(
        make_run,
        8,
        ppo_settings=settings,
        module={"reference": other_policy, "policy_optimizer": partial(torch.optim.AdamW, lr=3e-3)},
        reward=lambda prompt, response: 0.0,
    )
    kl = [
        float(torch.cat([kl_estimate(row.old_logprobs, row.ref_logprobs, "k3") for row in batch.rows]).mean())
        for batch in watch.batches
    ]
    assert kl[-1] < 0.5 * kl[0]
    assert all(float(row.returns.abs().max()) == 0.0 for row in watch.batches[0].rows)


def test_without_a_kl_there_is_no_reference(make_run):
    run, watch = fit(make_run)
    assert run.module.reference is None
    assert all(row.ref_logprobs is None for row in watch.batches[0].rows)


@pytest.mark.parametrize("chunks", [(4,), (2, 2)])
def test_entropy_bonus_raises_the_entropy(make_run, cut, chunks):
    def entropy(run):
        with torch.no_grad():
            logits = run.module.policy.model(input_ids=torch.tensor([[2, 6, 3]])).logits
        return float(torch.distributions.Categorical(logits=logits).entropy().mean())

    run = make_run(
        3,
        ppo_settings={"entropy_coef": 1.0},
        rollout=cut(*chunks),
        module=FAST,
        reward=lambda prompt, response: 0.0,
    )
    before = entropy(run)
    run.fit()
    assert entropy(run) > before + 0.01


# ---------------------------------------------------------------- truncated responses


def first_is_truncated(request):
    return request.sampling.max_tokens if request.request_id.endswith("_g0") else 3


@pytest.mark.parametrize("how", ["keep", "mask", "penalize"])
def test_truncated_responses(make_run, cut, how):
    settings = {"truncated_responses": how} | ({"truncation_penalty": 2.0} if how == "penalize" else {})
    _, watch = fit(make_run, ppo_settings=settings, rollout=cut(2, 2), fake=FakeEngine(length=first_is_truncated))
    (batch,) = watch.batches
    for row in batch.rows:
        reward, truncated = row.trajectory.reward, row.trajectory.sample_id.endswith("_g0")
        assert row.trajectory.truncated == truncated
        assert bool(row.mask.all()) == (not (truncated and how == "mask"))
        if truncated and how == "mask":
            assert not row.mask.any()
            assert not row.returns.any()
        else:
            penalty = 2.0 if truncated and how == "penalize" else 0.0
            assert row.returns.tolist() == pytest.approx([reward - penalty] * len(row.returns), abs=1e-5)
    (metrics,) = watch.metrics
    assert metrics["rollout/truncated_fraction"] == 0.5
    masked = how == "mask"
    assert metrics["rollout/masked_fraction"] == pytest.approx(8 / 11 if masked else 0.0)
    assert batch.num_sequences == (4 if masked else 8)
    assert batch.num_tokens == (12 if masked else 44)
    rewards = [row.trajectory.reward for row in batch.rows]
    # the metric is the reward function's own number, whatever the penalty
    assert metrics["rollout/reward_mean"] == pytest.approx(sum(rewards) / 8)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_bootstrap_of_truncated_responses(make_run, bootstrap):
    watch = Watch()
    run = make_run(
        1,
        ppo_settings={"bootstrap_truncated": bootstrap, "gamma": 0.5},
        fake=FakeEngine(length=first_is_truncated),
        callbacks=[watch],
    )
    torch.nn.init.constant_(run.module.critic.model.score.bias, 0.75)
    run.fit()
    for row in watch.batches[0].rows:
        truncated = row.trajectory.truncated
        expected = row.trajectory.reward + (0.5 * 0.75 if truncated and bootstrap else 0.0)
        assert float(row.returns[-1]) == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------- residency


def turns(ledger):
    """Who was resident, in order; fails if two ever were."""
    names, resident = [], None
    for event, name in ledger:
        if event == "load":
            assert resident is None
            resident = name
            names.append(name)
        else:
            assert event == "offload"
            assert resident == name
            resident = None
    return names


def test_turns_in_a_streaming_step(make_run, cut):
    """Pitfall 121. The critic is loaded before the wait, and serves the next chunk's values without another load."""
    _, watch = fit(make_run, 2, rollout=cut(2, 1, 1))
    assert turns(watch.residency.ledger) == ["critic", "policy"] * 6 + ["critic"]
    assert watch.residency.resident is None


def test_critic_is_resident_before_the_wait(make_run, cut):
    resident = []

    class Spy:
        def __init__(self, loader, watch):
            self.loader, self.watch = loader, watch

        def __iter__(self):
            chunks = iter(self.loader)
            while True:
                resident.append(self.watch.residency.resident)
                chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    watch = Watch()
    run = make_run(2, rollout=cut(2, 1, 1), callbacks=[watch])
    loader = run.data.train_dataloader()
    run.data.train_dataloader = lambda: Spy(loader, watch)
    run.fit()
    # only the first chunk ever finds an empty device
    assert resident == [None, *["critic"] * 5]


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_reference_takes_its_turn(make_run, cut, placement):
    settings = {"kl_placement": placement, "kl_coef": 0.1}
    _, watch = fit(make_run, 2, rollout=cut(2, 2), ppo_settings=settings)
    assert turns(watch.residency.ledger) == ["critic", "reference", "policy"] * 4 + ["critic"]
    assert watch.forward_rows["reference", False] == 16
    assert ("reference", True) not in watch.forward_rows


def test_turns_in_warmup(make_run, cut):
    _, watch = fit(make_run, 2, rollout=cut(2, 2), ppo_settings={"critic_warmup_steps": 2})
    assert turns(watch.residency.ledger) == ["critic"]


# ---------------------------------------------------------------- versions


def test_lookahead_0_trains_what_this_policy_sampled(make_run, cut):
    """Pitfalls 73, 76: at staleness 0 something is sampled, and it is never older than the policy."""
    run, watch = fit(make_run, 3, rollout=cut(2, 2))
    for step, batch in enumerate(watch.batches):
        assert {int(version) for row in batch.rows for version in row.trajectory.policy_versions} == {step}
    assert [metrics["rollout/version_age_max"] for metrics in watch.metrics] == [0, 0, 0]
    policy = run.module.policy.model.state_dict()
    assert run.fake.weights.keys() == policy.keys()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in run.fake.weights.items())


@pytest.mark.parametrize("correction", ["token", "truncated"])
def test_lookahead_1_is_at_most_one_version_behind(make_run, correction):
    _, watch = fit(
        make_run,
        3,
        rollout={"max_lookahead_versions": 1},
        ppo_settings={"importance_correction": correction},
        fake=FakeEngine(length=4),
    )
    stale = [metrics["rollout/version_age_max"] for metrics in watch.metrics]
    assert stale == [0, 1, 1]
    assert all(0 < metrics["rollout/version_age_mean"] <= 1 for metrics in watch.metrics[1:])
    assert all(metrics["policy/importance_weight_mean"] != 1.0 for metrics in watch.metrics)


def test_ready_first_trains_a_late_group_later(make_run):
    fake = FakeEngine(holds=lambda request: draw_of(request) == 0)
    trained = []

    class Follow(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            trained.append((payload.chunk.ppo_step, payload.chunk.draws))
            if payload.chunk.ppo_step == 1:
                fake.let_go()

    rollout = {
        "sampler": "ready_first",
        "max_lookahead_versions": 1,
        "max_trajectory_age_steps": 2,
        "min_groups_for_streaming_train": 2,
    }
    settings = {"importance_correction": "truncated"}
    _, watch = fit(make_run, 5, rollout=rollout, ppo_settings=settings, fake=fake, callbacks=[Follow()])
    draws = [draw for _, chunk in trained for draw in chunk]
    assert len(draws) == len(set(draws)) == 20
    (late,) = [step for step, chunk in trained if 0 in chunk]
    assert late >= 1
    assert watch.metrics[late]["rollout/version_age_max"] >= 1


# ---------------------------------------------------------------- metrics


def test_metrics_of_a_step(make_run, cut):
    _, watch = fit(make_run, 2, rollout=cut(2, 2), ppo_settings={"critic_ppo_epochs": 2})
    names = set(watch.metrics[0])
    assert names >= {
        "policy/loss",
        "policy/approx_kl",
        "policy/clip_fraction",
        "policy/entropy",
        "policy/grad_norm",
        "policy/lr",
        "critic/loss",
        "critic/loss_last_epoch",
        "critic/explained_variance",
        "critic/lr",
        "rollout/reward_mean",
        "rollout/reward_std",
        "rollout/response_length",
        "rollout/policy_age_max",
        "rollout/policy_age_mean",
        "rollout/token_mult_prob_error",
        "rollout/trajectory_age_mean",
        "rollout/version_age_max",
        "rollout/version_age_mean",
        "rollout/truncated_fraction",
        "time/wait_s",
        "time/policy_s",
        "time/critic_s",
        "time/refit_s",
        "time/step_s",
        "throughput/response_tokens_per_s",
    }
    for metrics in watch.metrics:
        assert all(value == value and abs(value) != float("inf") for value in metrics.values())
        # phases do not overlap: together they are the step
        phases = [value for name, value in metrics.items() if name.startswith("time/")]
        whole = metrics["time/step_s"]
        assert sum(phases) - whole - metrics["time/generation_s"] == pytest.approx(whole, rel=1e-6)
        assert metrics["time/overhead_s"] >= 0


def test_critic_loss_falls_within_the_epochs_of_a_step(make_run):
    _, watch = fit(make_run, ppo_settings={"critic_ppo_epochs": 8})
    (metrics,) = watch.metrics
    assert metrics["critic/loss_last_epoch"] < metrics["critic/loss"]


def test_sampler_mismatch_of_a_few_ulps_is_not_lost_to_rounding(make_run):
    """In float32, exp(x) - 1 - x of a tiny x is rounding error: 0, or of either sign."""

    class Nearly(ppo.PPOCallback):
        def __init__(self):
            self.kl = []

        def on_chunk_ready(self, trainer, pl_module, payload):
            chunk = payload.chunk
            rows = AdvantageStage(
                pl_module.policy,
                pl_module.critic,
                None,
                ppo.PPOConfig(ppo_epochs=2),
                pl_module.streaming_strategy.residency,
                PhaseTimer(),
            ).run(chunk)
            for row in rows:
                row.trajectory.rollout_logprobs.copy_(row.old_logprobs * (1 + 2e-7))

        def on_policy_update_end(self, trainer, pl_module, payload):
            self.kl.append(payload.stats[0].sampler_mismatch_kl)

    seen = Nearly()
    make_run(3, callbacks=[seen]).fit()
    assert len(seen.kl) == 3
    assert all(0 < kl < 1e-11 for kl in seen.kl)
