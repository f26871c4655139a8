"""Against a second computation in float64: one padded tensor, the textbook formulas, one backward pass."""

import dataclasses
import math

import pytest
import torch

# Streamed one row at a time, so that the package's way is as far from the oracle's as it can be.


def _whole_batch(kit, policy, rows, cfg, centre):
    """The gradient of the mean loss, written without anything of the package."""
    model = policy.model
    width = max(r.trajectory.num_tokens for r in rows)
    ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    padded = {name: torch.zeros(len(rows), width, dtype=torch.float64) for name in ("a", "rollout", "ref", "old")}
    for i, row in enumerate(rows):
        t = row.trajectory
        start, stop = len(t.prompt_ids), t.num_tokens
        ids[i, :stop] = torch.cat([t.prompt_ids, t.response_ids])
        mask[i, start:stop] = row.mask
        for name, values in (
            ("a", row.advantages), ("rollout", t.rollout_logprobs), ("ref", row.ref_logprobs), ("old", row.old_logprobs)
        ):  # fmt: skip
            padded[name][i, start:stop] = values
    logits = model(input_ids=ids).logits[:, :-1] / policy.temperature
    table = torch.log_softmax(logits, -1)
    logprob = table.gather(-1, ids[:, 1:, None])[..., 0]
    mask = mask[:, 1:]
    a, rollout, ref, old = (padded[name][:, 1:] for name in ("a", "rollout", "ref", "old"))

    valid = a[mask]
    if cfg.normalize_advantages in ("batch", "chunk"):
        a = (a - valid.mean()) / torch.sqrt(valid.var() + 1e-8)
    elif cfg.normalize_advantages == "running":
        a = (a - centre) / torch.sqrt(((valid - centre) ** 2).sum() / (len(valid) - 1) + 1e-8)
    before = logprob.detach() if cfg.ratio_is_one else old
    ratio = torch.exp(logprob - before)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - cfg.clip_eps, 1 + (cfg.clip_eps_high or cfg.clip_eps)))
    if cfg.dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * cfg.dual_clip), loss)
    if cfg.importance_correction != "none":
        gap = (before - rollout).detach()
        weight, low, high = gap.exp(), cfg.importance_clip_min, cfg.importance_clip_max
        for i in mask.any(1).nonzero()[:, 0].tolist():
            kept, mean = mask[i], float(gap[i][mask[i]].mean().exp())
            if cfg.importance_correction in ("truncated", "sequence"):
                raw = weight[i] if cfg.importance_correction == "truncated" else torch.full_like(weight[i], mean)
                weight[i] = raw.clamp(low, high)
            elif cfg.importance_correction == "icepop":
                weight[i, kept & ((weight[i] < low) | (weight[i] > high))] = 0.0
            elif cfg.importance_correction == "sequence_mask" and not low <= mean <= high:
                weight[i] = 0.0
        loss = loss * weight
    if cfg.kl_coef:
        d = ref - logprob
        kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[cfg.kl_type]
        # the gradient of an expectation under the policy: its score times the value, plus the value's own
        loss = loss + cfg.kl_coef * (kl + kl.detach() * (logprob - logprob.detach())).clamp(-10, 10)
    loss = loss + cfg.entropy_coef * (table.exp() * table).sum(-1)
    loss = torch.where(mask, loss, 0.0)
    if cfg.loss_level == "token":
        mean = loss.sum() / mask.sum()
    else:
        mean = (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum()
    grads = torch.autograd.grad(mean, list(dict.fromkeys(model.parameters())))
    return torch.cat([g.reshape(-1) for g in grads]), float(mean.detach())


CASES = {
    "off": {"normalize_advantages": "off"},
    "running": {"normalize_advantages": "running", "importance_correction": "token"},
    "running, sequence": {
        "normalize_advantages": "running", "loss_level": "sequence", "kl_placement": "loss", "kl_coef": 0.4,
        "kl_type": "k1", "entropy_coef": 0.3,
    },
    "batch": {"normalize_advantages": "batch", "kl_placement": "loss", "kl_coef": 0.4, "kl_type": "k2"},
    "batch, sequence": {
        "normalize_advantages": "batch", "loss_level": "sequence", "kl_placement": "loss", "kl_coef": 0.4,
        "kl_type": "k3", "entropy_coef": 0.3, "importance_correction": "truncated", "importance_clip_max": 1.1,
        "importance_clip_min": 0.4,
    },
    "running, sequence weights": {
        "normalize_advantages": "running", "importance_correction": "sequence", "importance_clip_max": 0.35,
        "importance_clip_min": 0.15,
    },
    "batch, icepop": {
        "normalize_advantages": "batch", "importance_correction": "icepop", "importance_clip_max": 1.5,
        "importance_clip_min": 0.4, "entropy_coef": 0.3,
    },
    "batch, sequence, sequence mask": {
        "normalize_advantages": "batch", "loss_level": "sequence", "importance_correction": "sequence_mask",
        "importance_clip_max": 1.2, "importance_clip_min": 0.15,
    },
}  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", CASES)
def test_streamed_policy_gradient_is_the_textbook_one(kit, name, temperature):
    rows = kit.random_rows(6, seed=21, masked=(0, 4))
    policy = kit.tiny_policy(temperature=temperature)
    rig = kit.Rig(policy, kit.config(**CASES[name]), centre=0.45)
    exact, mean = _whole_batch(kit, policy, rows, rig.config, 0.45)
    stats = rig.step([[row] for row in rows])
    assert (0 < stats.out_of_bounds_fraction < 1) == (rig.config.importance_clip_max is not None)
    assert kit.relative_error(rig.gradients[-1], exact) <= 1e-12
    # the logged loss leaves no term out
    assert stats.loss == pytest.approx(mean, rel=1e-10)
    assert stats.grad_norm == pytest.approx(float(exact.norm()), rel=1e-12)
    assert kit.relative_error(rig.gradient([rows]), exact) <= 1e-12


def _old_logprobs_of_the_engine(rows):
    return [dataclasses.replace(row, old_logprobs=row.trajectory.rollout_logprobs) for row in rows]


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
@pytest.mark.parametrize("mode", ["running", "batch", "chunk", "off"])
@pytest.mark.parametrize(("level", "epochs"), [("token", 1), ("token", 2), ("sequence", 2)])
def test_full_batch_with_a_ratio(kit, old_logprobs, mode, level, epochs):
    """Several epochs, or the engine's log-probs below the ratio: clips on both sides and the dual clip are active."""
    rows = kit.random_rows(6, seed=22, masked=(3,))
    if old_logprobs == "rollout":
        rows = _old_logprobs_of_the_engine(rows)
    policy = kit.tiny_policy()
    settings = kit.config(
        normalize_advantages=mode, old_logprobs=old_logprobs, ppo_epochs=epochs, loss_level=level, clip_eps_high=0.3,
        dual_clip=1.5,
    )  # fmt: skip
    rig = kit.Rig(policy, settings, centre=0.2)
    exact, mean = _whole_batch(kit, policy, rows, settings, 0.2)
    stats = rig.step([rows])
    assert (0 < stats.clip_fraction < 1) == (not settings.ratio_is_one)
    assert kit.relative_error(rig.gradients[-1], exact) <= 1e-12
    assert stats.loss == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("kind", ["token", "truncated", "sequence", "icepop", "sequence_mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_recomputed_old_logprobs_with_every_correction(kit, kind, level):
    """Several epochs: the ratio is to the old policy, the weight corrects the old policy against the engine."""
    rows = kit.random_rows(6, seed=22, masked=(3,))
    bounds = {} if kind == "token" else {"importance_clip_min": 0.4, "importance_clip_max": 1.5}
    settings = kit.config(
        normalize_advantages="batch",
        ppo_epochs=2,
        loss_level=level,
        dual_clip=1.5,
        importance_correction=kind,
        **bounds,
    )
    rig = kit.Rig(kit.tiny_policy(), settings)
    exact, mean = _whole_batch(kit, rig.model, rows, settings, 0.0)
    stats = rig.step([rows])
    assert 0 < stats.clip_fraction < 1
    assert (0 < stats.out_of_bounds_fraction < 1) == bool(bounds)
    assert kit.relative_error(rig.gradients[-1], exact) <= 1e-12
    assert stats.loss == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_old_logprobs_of_the_engine_in_a_streamed_step(kit, level):
    """With `off` nothing but the counts is left to the close, so that a ratio does no harm."""
    rows = _old_logprobs_of_the_engine(kit.random_rows(6, seed=22, masked=(3,)))
    settings = kit.config(normalize_advantages="off", old_logprobs="rollout", loss_level=level, dual_clip=1.5)
    rig = kit.Rig(kit.tiny_policy(), settings)
    exact, mean = _whole_batch(kit, rig.model, rows, settings, 0.0)
    stats = rig.step([rows[:1], rows[1:4], rows[4:]])
    assert 0 < stats.clip_fraction < 1
    assert kit.relative_error(rig.gradients[-1], exact) <= 1e-12
    assert stats.loss == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_streamed_critic_gradient_is_the_textbook_one(kit, clip):
    rows = kit.random_rows(6, seed=23, masked=(1,))
    critic = kit.tiny_critic()
    rig = kit.Rig(critic, kit.config(value_clip_eps=clip, value_loss_scale=0.7))
    losses = []
    for row in rows:
        ids = torch.cat([row.trajectory.prompt_ids, row.trajectory.response_ids])
        # the value of the state before a token stands where the token before it is read
        value = critic.model(input_ids=ids[None]).logits[0, len(row.trajectory.prompt_ids) - 1 : -1, 0]
        error = (value - row.returns) ** 2
        if clip is not None:
            clipped = torch.minimum(torch.maximum(value, row.values - clip), row.values + clip)
            error = torch.maximum(error, (clipped - row.returns) ** 2)
        losses.append(0.5 * 0.7 * error[row.mask])
    mean = torch.cat(losses).mean()
    grads = torch.autograd.grad(mean, list(critic.model.parameters()))
    stats = rig.step([[row] for row in rows])
    assert kit.relative_error(rig.gradients[-1], torch.cat([g.reshape(-1) for g in grads])) <= 1e-12
    assert stats.loss == pytest.approx(float(mean.detach()), rel=1e-10)
    assert stats.num_tokens == sum(int(row.mask.sum()) for row in rows)


def test_gradient_is_a_mean_over_the_closed_form_count(kit):
    """Aggregation written out for rows of one token each: twice the same rows, the same gradient (ROLL d8d7e78f)."""
    rows = kit.random_rows(3, seed=24)
    for level in ("token", "sequence"):
        rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="off", loss_level=level))
        once = rig.gradient([rows])
        assert kit.relative_error(rig.gradient([rows, rows]), once) <= 1e-12
        assert math.isfinite(float(once.norm()))
