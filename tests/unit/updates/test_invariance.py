"""Micro-batches, padding and ranks are ways to compute the same gradient."""

import dataclasses

import pytest
import torch

from lightning_ppo.models import micro_batch

WEIGHTS = {
    "token": {},
    "truncated": {"importance_clip_max": 0.9},
    "sequence": {"importance_clip_max": 0.9},
    "icepop": {"importance_clip_min": 0.3},
    "sequence_mask": {"importance_clip_min": 0.5},
}
FULL = {"entropy_coef": 0.1, "importance_correction": "token", "kl_placement": "loss", "kl_coef": 0.2}


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batch_size(kit, kind, level):
    """One row each, ragged groups, all at once: nothing is normalised per micro-batch (verl 6957, NeMo RL 86)."""
    rows = kit.random_rows(7, seed=41, masked=(2,))
    model = kit.tiny_policy() if kind == "policy" else kit.tiny_critic()
    gradients, norms = [], []
    for tokens in (1, 9, 14, 25, 10_000):
        rig = kit.Rig(model, kit.config(micro_batch_tokens=tokens, loss_level=level, **FULL), centre=0.3)
        norms.append(rig.step([rows[:4], rows[4:]]).grad_norm)
        gradients.append(rig.gradients[-1])
    assert max(kit.relative_error(g, gradients[0]) for g in gradients) <= 1e-12
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-12)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_what_fills_the_padding(kit, kind, monkeypatch):
    """Whatever stands behind a response, also a real token of the vocabulary, has no effect (trl 2708)."""
    rows = kit.random_rows(5, seed=42)
    rig = kit.Rig(kit.tiny_policy() if kind == "policy" else kit.tiny_critic(), kit.config(micro_batch_tokens=500))
    zeros = rig.gradient([rows])
    monkeypatch.setattr(micro_batch, "PAD_ID", 9)
    assert torch.equal(rig.gradient([rows]), zeros)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_tokens_after_the_last_trained_one(kit, kind):
    """Tokens that an environment appended behind the response influence nothing that is trained."""
    rows = kit.random_rows(4, seed=43)
    appended = []
    for row in rows:
        t = row.trajectory

        def longer(x, fill):
            return torch.cat([x, torch.full((2,), fill, dtype=x.dtype)])

        changed = {name: longer(getattr(t, name), 0) for name in ("response_mask", "rollout_logprobs")}
        trajectory = dataclasses.replace(
            t, response_ids=longer(t.response_ids, 5), policy_versions=longer(t.policy_versions, 0), **changed
        )
        fields = ("mask", "values", "advantages", "returns", "old_logprobs", "ref_logprobs")
        appended.append(
            dataclasses.replace(row, trajectory=trajectory, **{name: longer(getattr(row, name), 0) for name in fields})
        )
    rig = kit.Rig(kit.tiny_policy() if kind == "policy" else kit.tiny_critic(), kit.config(micro_batch_tokens=500))
    assert kit.relative_error(rig.gradient([appended]), rig.gradient([rows])) <= 1e-12


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_stands_at_masked_positions(kit, kind, poison):
    """Selection, not multiplication: NaN times 0 would be NaN (SkyRL 1635, AReaL 1346, verl 4120)."""
    rows = kit.random_rows(5, seed=44, masked=(1,))
    model = kit.tiny_policy() if kind == "policy" else kit.tiny_critic()
    poisoned = _poisoned(rows, poison)
    for mode in ("running", "batch", "chunk", "off"):
        rig = kit.Rig(model, kit.config(normalize_advantages=mode, value_clip_eps=0.1, **FULL))
        clean = dataclasses.asdict(rig.step([rows[:2], rows[2:]]))
        stats = dataclasses.asdict(rig.step([poisoned[:2], poisoned[2:]]))
        assert torch.equal(rig.gradients[1], rig.gradients[0])
        assert stats == clean


@pytest.mark.parametrize("correction", WEIGHTS)
@pytest.mark.parametrize("poison", [float("nan"), -float("inf")])
def test_logprobs_of_the_engine_at_masked_positions(kit, correction, poison):
    """Nor does it matter to any importance weight, with one update or several."""
    rows = kit.random_rows(5, seed=44, masked=(1,))
    poisoned = _poisoned(rows, poison)
    for epochs in (1, 2):
        settings = kit.config(ppo_epochs=epochs, importance_correction=correction, **WEIGHTS[correction])
        rig = kit.Rig(kit.tiny_policy(), settings)
        clean, stats = (dataclasses.asdict(rig.step([share])) for share in (rows, poisoned))
        assert torch.equal(rig.gradients[1], rig.gradients[0])
        assert stats == clean


def _poisoned(rows, poison):
    poisoned = []
    for row in rows:
        fields = {
            name: torch.where(row.mask, getattr(row, name), poison)
            for name in ("values", "advantages", "returns", "old_logprobs", "ref_logprobs")
        }
        t = row.trajectory
        t = dataclasses.replace(t, rollout_logprobs=torch.where(row.mask, t.rollout_logprobs, poison))
        poisoned.append(dataclasses.replace(row, trajectory=t, **fields))
    return poisoned


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_masked_row_is_not_there(kit, kind):
    rows = kit.random_rows(5, seed=45, masked=(0, 3))
    rig = kit.Rig(kit.tiny_policy() if kind == "policy" else kit.tiny_critic(), kit.config(loss_level="sequence"))
    with_masked = rig.gradient([rows])
    assert torch.equal(rig.gradient([[row for row in rows if row.mask.any()]]), with_masked)


@pytest.mark.parametrize("mode", ["running", "batch", "off"])
@pytest.mark.parametrize(("level", "correction"), [("token", "token"), *(("sequence", kind) for kind in WEIGHTS)])
def test_two_ranks_make_the_step_of_one(kit, mode, level, correction):
    """Shares of very unequal length: the count is global, nothing is averaged over ranks (prime-rl 2562, 816)."""
    rows = sorted(kit.random_rows(8, seed=46, masked=(5,)), key=lambda row: int(row.mask.sum()))
    weights = {"importance_correction": correction, **WEIGHTS[correction]}
    settings = kit.config(normalize_advantages=mode, loss_level=level, micro_batch_tokens=12, **FULL | weights)
    single = kit.Rig(kit.tiny_policy(), settings, centre=0.3)
    wanted = dataclasses.asdict(single.step([rows]))
    # made here, since the seed is shared by all threads
    models = [kit.tiny_policy() for _ in range(2)]

    def work(ranks):
        share = rows[:4] if ranks.rank == 0 else rows[4:]
        rig = kit.Rig(models[ranks.rank], settings, ranks=ranks, centre=0.3)
        stats = rig.step([share[:1], share[1:]])
        return rig.gradients[-1], dataclasses.asdict(stats)

    for gradient, stats in kit.on_ranks(2, work):
        assert kit.relative_error(gradient, single.gradients[-1]) <= 1e-12
        assert stats == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", ["running", "batch", "chunk"])
def test_a_rank_without_a_valid_token_takes_part(kit, mode):
    """No rank waits for another that has nothing to do, and the origin comes from whoever has tokens."""
    rows = kit.random_rows(4, seed=47, masked=(0, 1))
    settings = kit.config(normalize_advantages=mode, **FULL)
    single = kit.Rig(kit.tiny_policy(), settings)
    single.step([rows[2:]] if mode == "chunk" else [rows])
    # made here, since the seed is shared by all threads
    models = [kit.tiny_policy() for _ in range(2)]

    def work(ranks):
        rig = kit.Rig(models[ranks.rank], settings, ranks=ranks)
        return rig.gradient([rows[:2], rows[:1]] if ranks.rank == 0 else [rows[2:], rows[:1]])

    results = kit.on_ranks(2, work)
    assert torch.equal(results[0], results[1])
    assert kit.relative_error(results[0], single.gradients[-1]) <= 1e-12


def test_two_ranks_of_the_critic(kit):
    rows = kit.random_rows(6, seed=48)
    settings = kit.config(value_clip_eps=0.1)
    single = kit.Rig(kit.tiny_critic(), settings)
    wanted = dataclasses.asdict(single.step([rows]))
    # made here, since the seed is shared by all threads
    models = [kit.tiny_critic() for _ in range(2)]

    def work(ranks):
        rig = kit.Rig(models[ranks.rank], settings, ranks=ranks)
        return dataclasses.asdict(rig.step([rows[:2]] if ranks.rank == 0 else [rows[2:]])), rig.gradients[-1]

    for stats, gradient in kit.on_ranks(2, work):
        assert kit.relative_error(gradient, single.gradients[-1]) <= 1e-12
        assert stats == pytest.approx(wanted, rel=1e-9)
