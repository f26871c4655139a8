"""Importance weights within an update: what is logged, and what happens to weights that are no numbers."""

import dataclasses
import math

import pytest
import torch

from lightning_ppo.errors import StepError
from lightning_ppo.models.micro_batch import collate
from lightning_ppo.step_metrics import policy_metrics

GAPS = {
    "s0": [0.1, -0.3],
    "s1": [2.0, 0.0, -1.0],
    "s2": [-0.05],
    "s3": [-1.5, -1.5],
}
"""Log-prob of the trainer minus that of the engine, at the trained tokens of each row."""
KINDS = {
    "token": {},
    "truncated": {"importance_clip_max": 1.5, "importance_clip_min": 0.5},
    "sequence": {"importance_clip_max": 1.2, "importance_clip_min": 0.5},
    "icepop": {"importance_clip_max": 1.5, "importance_clip_min": 0.5},
    "sequence_mask": {"importance_clip_max": 1.2, "importance_clip_min": 0.5},
}


@torch.no_grad()
def _rows(kit, policy, gaps=GAPS):
    """Rows whose engine is off by exactly these gaps."""
    rows = []
    for row, wanted in zip(kit.random_rows(4, seed=91), gaps.values(), strict=True):
        t = row.trajectory
        length = max(len(wanted), 3)
        t = dataclasses.replace(
            t,
            response_ids=torch.arange(2, 2 + length),
            response_mask=torch.arange(length) < len(wanted),
            policy_versions=torch.zeros(length, dtype=torch.int64),
        )
        logprobs = policy(collate([t], [0], torch.device("cpu")))[0][0]
        rollout = torch.zeros(length, dtype=torch.float64)
        rollout[: len(wanted)] = logprobs[: len(wanted)] - torch.tensor(wanted, dtype=torch.float64)
        advantages = torch.linspace(-1, 1, length, dtype=torch.float64) * t.response_mask
        zeros = torch.zeros(length, dtype=torch.float64)
        rows.append(
            dataclasses.replace(
                row,
                trajectory=dataclasses.replace(t, rollout_logprobs=rollout),
                mask=t.response_mask,
                values=zeros,
                advantages=advantages,
                returns=zeros,
                old_logprobs=torch.where(t.response_mask, logprobs, 0.0),
            )
        )
    return rows


def _expected(kind, low, high):
    """Weight used, raw weight, and whether it is outside, of each trained token: the definitions once more."""
    for gaps in GAPS.values():
        mean = math.exp(sum(gaps) / len(gaps))
        for gap in gaps:
            raw = mean if kind == "sequence" else math.exp(gap)
            outside = kind != "token" and not low <= (mean if kind == "sequence_mask" else raw) <= high
            if kind in ("icepop", "sequence_mask"):
                yield 0.0 if outside else raw, raw, outside
            else:
                yield min(max(raw, low), high) if kind != "token" else raw, raw, outside


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_logged(kit, kind, epochs):
    policy = kit.tiny_policy()
    settings = kit.config(importance_correction=kind, ppo_epochs=epochs, normalize_advantages="off", **KINDS[kind])
    stats = kit.Rig(policy, settings).step([_rows(kit, policy)])
    used, raw, outside = zip(*_expected(kind, *settings.importance_bounds), strict=True)
    count = len(used)
    assert stats.num_tokens == count == 8
    assert stats.importance_weight_mean == pytest.approx(sum(used) / count, rel=1e-9)
    assert stats.importance_weight_raw_mean == pytest.approx(sum(raw) / count, rel=1e-9)
    assert stats.importance_weight_raw_max == pytest.approx(max(raw), rel=1e-9)
    assert stats.out_of_bounds_fraction == sum(outside) / count
    assert stats.importance_masked_fraction == used.count(0.0) / count
    assert any(outside) == (kind != "token")
    gaps = [abs(gap) for row in GAPS.values() for gap in row]
    assert stats.token_mult_prob_error == pytest.approx(sum(map(math.exp, gaps)) / count, rel=1e-9)
    assert stats.sampler_mismatch_max == pytest.approx(2.0, rel=1e-9)


def test_without_correction_only_the_mismatch_shows(kit):
    policy = kit.tiny_policy()
    stats = kit.Rig(policy, kit.config()).step([_rows(kit, policy)])
    assert stats.importance_weight_mean == stats.importance_weight_raw_mean == stats.importance_weight_raw_max == 1.0
    assert stats.out_of_bounds_fraction == stats.importance_masked_fraction == 0.0
    assert stats.token_mult_prob_error > 1.1


@pytest.mark.parametrize("first", [0, 1, 3])
def test_the_largest_weight_of_all_ranks(kit, first):
    """A maximum over ranks, also when one of them has no rows."""
    settings = kit.config(importance_correction="icepop", **KINDS["icepop"])
    # made here, since the seed is shared by all threads
    models = [kit.tiny_policy() for _ in range(2)]
    rows = _rows(kit, models[0])
    wanted = dataclasses.asdict(kit.Rig(kit.tiny_policy(), settings).step([rows]))

    def work(ranks):
        share = rows[:first] if ranks.rank == 0 else rows[first:]
        return dataclasses.asdict(kit.Rig(models[ranks.rank], settings, ranks=ranks).step([share]))

    for stats in kit.on_ranks(2, work):
        assert stats == pytest.approx(wanted, rel=1e-9)


def test_a_maximum_does_not_outlive_its_update(kit):
    policy = kit.tiny_policy()
    rig = kit.Rig(policy, kit.config(importance_correction="token"))
    large = rig.step([_rows(kit, policy)])
    small = rig.step([_rows(kit, policy, GAPS | {"s1": [0.2, 0.0, -0.2]})])
    assert large.importance_weight_raw_max == pytest.approx(math.exp(2.0))
    assert small.importance_weight_raw_max == pytest.approx(math.exp(0.2))
    assert small.sampler_mismatch_max == pytest.approx(1.5)


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_engine_has_no_logprob_of(kit, kind, poison):
    """It (or, where the row decides, its row) leaves no trace in the gradient, and is counted."""
    policy = kit.tiny_policy()
    rows = _rows(kit, policy)
    settings = kit.config(importance_correction=kind, normalize_advantages="off", **KINDS[kind])
    clean = kit.Rig(policy, settings).step([rows])
    t = rows[0].trajectory
    rollout = t.rollout_logprobs.clone()
    rollout[0] = poison
    hit = dataclasses.replace(rows[0], trajectory=dataclasses.replace(t, rollout_logprobs=rollout))
    rig = kit.Rig(policy, settings)
    stats = rig.step([[hit, *rows[1:]]])
    lost = 2 if kind in ("sequence", "sequence_mask") else 1
    assert stats.importance_masked_fraction == pytest.approx(clean.importance_masked_fraction + lost / 8)
    assert stats.out_of_bounds_fraction == pytest.approx(clean.out_of_bounds_fraction + lost / 8)
    assert math.isfinite(stats.importance_weight_raw_mean)
    # the same as with an advantage of 0 there
    advantages = rows[0].advantages.clone()
    advantages[:lost] = 0.0
    without = [dataclasses.replace(rows[0], advantages=advantages), *rows[1:]]
    assert kit.relative_error(rig.gradients[-1], kit.Rig(policy, settings).gradient([without])) <= 1e-12


@pytest.mark.parametrize("kind", ["icepop", "sequence_mask"])
@pytest.mark.parametrize("sizes", [[4], [1, 3]])
def test_a_step_without_any_weight_fails_before_the_optimizer(kit, kind, sizes):
    """NeMo RL 3671: momentum would move the policy although nothing was learned."""
    policy = kit.tiny_policy()
    rows = _rows(kit, policy, {name: [-2.0] * len(gaps) for name, gaps in GAPS.items()})
    rig = kit.Rig(policy, kit.config(importance_correction=kind, **KINDS[kind]))
    chunks = [rows[: sizes[0]], rows[sizes[0] :]][: len(sizes)]
    with pytest.raises(StepError) as caught:
        rig.step(chunks)
    assert str(caught.value) == (
        f"importance_correction={kind} gave every trained token weight 0 (largest weight before the bounds: 0.135), "
        "and nothing was updated; widen importance_clip_min and importance_clip_max, or let rollouts be less old"
    )
    assert rig.gradients == []


@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_hide_a_broken_policy(kit, kind):
    """Log-probs of NaN give weights of 0; the step fails all the same."""
    policy = kit.tiny_policy()
    rows = _rows(kit, policy)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[3] = math.nan
    rig = kit.Rig(policy, kit.config(importance_correction=kind, **KINDS[kind]))
    with pytest.raises(StepError, match=r"^policy loss is nan in PPO step 3 chunk 0, "):
        rig.step([rows])
    assert rig.gradients == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_mismatch_is_to_the_trainer_whatever_the_ratio_is_to(kit, epochs):
    """With old_logprobs=rollout the ratio's denominator is the engine's own: compared with itself, it would be 0."""
    policy = kit.tiny_policy()
    rows = _rows(kit, policy)
    recomputed = kit.Rig(policy, kit.config(normalize_advantages="off", ppo_epochs=epochs)).step([rows])
    engine = [dataclasses.replace(row, old_logprobs=row.trajectory.rollout_logprobs) for row in rows]
    settings = kit.config(normalize_advantages="off", ppo_epochs=epochs, old_logprobs="rollout")
    reported = kit.Rig(policy, settings).step([engine])
    for name in ("sampler_mismatch_kl", "sampler_mismatch_max", "token_mult_prob_error"):
        assert getattr(reported, name) == pytest.approx(getattr(recomputed, name), rel=1e-9)
    assert reported.token_mult_prob_error > 1.1


@pytest.mark.parametrize("kind", ["icepop", "sequence_mask"])
def test_a_minibatch_without_any_weight_is_skipped(kit, kind):
    """One of several in a step: the optimizer, and with it the momentum, does not move; the next one is as ever."""
    policy = kit.tiny_policy()
    useless = _rows(kit, policy, {name: [-2.0] * len(gaps) for name, gaps in GAPS.items()})
    settings = kit.config(normalize_advantages="off", policy_minibatches=2, importance_correction=kind, **KINDS[kind])
    rig = kit.Rig(policy, settings)
    rows = [dataclasses.replace(row, old_logprobs=row.trajectory.rollout_logprobs) for row in _rows(kit, policy)]
    useless = [dataclasses.replace(row, old_logprobs=row.trajectory.rollout_logprobs - 2.0) for row in useless]
    assert rig.step([useless]) is None
    assert rig.gradients == []
    assert rig.step([rows]).num_tokens == sum(row.trained_tokens for row in rows)
    assert torch.equal(rig.gradients[-1], kit.Rig(policy, settings).gradient([rows]))


def _two_updates(kit, **settings):
    """Stats of two minibatches with different numbers of rows and of tokens per row."""
    policy = kit.tiny_policy()
    rig = kit.Rig(policy, kit.config(normalize_advantages="off", **settings))
    rows = _rows(kit, policy)
    stats = rig.step([rows[2:]]), rig.step([rows[:2]])
    assert len({entry.num_tokens / entry.num_sequences for entry in stats}) == 2
    return stats


def test_metrics_of_a_step_are_means_over_its_tokens(kit):
    """verl 2952 and its kin: a mean of minibatches' means weighs tokens of short minibatches more."""
    stats = _two_updates(kit, importance_correction="token")
    tokens = [entry.num_tokens for entry in stats]
    metrics = policy_metrics([stats], kit.config())
    for name in ("loss", "entropy", "clip_fraction", "importance_weight_raw_mean", "importance_masked_fraction"):
        expected = sum(n * getattr(entry, name) for n, entry in zip(tokens, stats, strict=True)) / sum(tokens)
        assert metrics[f"policy/{name}"] == pytest.approx(expected, rel=1e-12)
    assert metrics["policy/grad_norm"] == pytest.approx(sum(entry.grad_norm for entry in stats) / 2, rel=1e-12)
    assert metrics["policy/importance_weight_raw_max"] == max(entry.importance_weight_raw_max for entry in stats)
    assert policy_metrics([], kit.config()) == policy_metrics([[]], kit.config()) == {}
    assert policy_metrics([stats[:1]], kit.config())["policy/loss"] == stats[0].loss


def test_the_loss_of_a_step_at_sequence_level_is_a_mean_over_its_rows(kit):
    stats = _two_updates(kit, loss_level="sequence")
    rows = [entry.num_sequences for entry in stats]
    expected = sum(n * entry.loss for n, entry in zip(rows, stats, strict=True)) / sum(rows)
    metrics = policy_metrics([stats], kit.config(loss_level="sequence"))
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-12)


def test_the_sampler_is_compared_with_what_was_there_before_the_first_update(kit):
    first, second = _two_updates(kit, importance_correction="token")
    later = dataclasses.replace(first, sampler_mismatch_max=99.0, token_mult_prob_error=99.0, sampler_mismatch_kl=99.0)
    # recomputed log-probs are from before the first update in every minibatch of the first epoch
    metrics = policy_metrics([(first, second), (later, later)], kit.config(ppo_epochs=2, policy_minibatches=2))
    tokens = first.num_tokens, second.num_tokens
    both = tokens[0] * first.token_mult_prob_error + tokens[1] * second.token_mult_prob_error
    assert metrics["rollout/token_mult_prob_error"] == pytest.approx(both / sum(tokens), rel=1e-12)
    assert metrics["rollout/sampler_mismatch_max"] == max(first.sampler_mismatch_max, second.sampler_mismatch_max)
    # without them only the first minibatch saw the policy that was
    alone = policy_metrics([(first, later)], kit.config(old_logprobs="rollout", policy_minibatches=2))
    assert alone["rollout/sampler_mismatch_max"] == first.sampler_mismatch_max
    assert alone["rollout/token_mult_prob_error"] == first.token_mult_prob_error
