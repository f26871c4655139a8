"""Into whatever chunks a step falls, the optimizer gets the gradient of the whole step."""

import dataclasses

import pytest
import torch

from lightning_ppo.models.micro_batch import collate

BARE = {"normalize_advantages": "off"}
RUNNING = {"normalize_advantages": "running"}
BATCH = {"normalize_advantages": "batch"}
SEQUENCE = {"loss_level": "sequence"}
WEIGHTS = {
    kind: {"importance_correction": kind} | ({"importance_clip_min": low, "importance_clip_max": high} if low else {})
    for kind, low, high in (
        ("token", None, None),
        ("truncated", 0.9, 1.1),
        ("sequence", 0.9, 1.1),
        ("icepop", 0.9, 1.1),
        ("sequence_mask", 0.9, 1.1),
    )
}
TOKEN_WEIGHTS, TRUNCATED_WEIGHTS = WEIGHTS["token"], WEIGHTS["truncated"]
REGULARIZED = {"kl_placement": "loss", "kl_coef": 0.3, "entropy_coef": 0.2}

SETTINGS = {
    "off": BARE,
    "off, sequence, regularized": BARE | SEQUENCE | REGULARIZED,
    "running": RUNNING,
    "running, sequence, token weights": RUNNING | SEQUENCE | TOKEN_WEIGHTS,
    "running, k1": RUNNING | REGULARIZED | {"kl_type": "k1"},
    "running, truncated weights, k2": RUNNING | TRUNCATED_WEIGHTS | REGULARIZED | {"kl_type": "k2"},
    "batch": BATCH,
    "batch, sequence": BATCH | SEQUENCE,
    "batch, token weights": BATCH | TOKEN_WEIGHTS,
    "batch, sequence, truncated weights, k3": BATCH | SEQUENCE | TRUNCATED_WEIGHTS | REGULARIZED,
    **{
        f"{mode}, {level}, {kind} weights": {"normalize_advantages": mode, "loss_level": level} | WEIGHTS[kind]
        for kind, level in (("sequence", "token"), ("icepop", "sequence"), ("sequence_mask", "sequence"))
        for mode in ("off", "running", "batch")
    },
}


@torch.no_grad()
def _with_mild_rollout_logprobs(policy, rows):
    """Log-probs of an engine that is a little off, so that some weights are out of bounds and others are not."""
    generator = torch.Generator().manual_seed(3)
    changed = []
    for index, row in enumerate(rows):
        t = row.trajectory
        logprobs = policy(collate([t], [0], torch.device("cpu")))[0][0]
        gap = (
            0.2 * torch.randn(len(logprobs), generator=generator, dtype=torch.float64) + (0.03, 0.3, 0.0, -0.05)[index]
        )
        rollout = torch.where(t.response_mask, logprobs - gap, 0.0).to(row.advantages.dtype)
        changed.append(dataclasses.replace(row, trajectory=dataclasses.replace(t, rollout_logprobs=rollout)))
    return changed


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_policy_gradient_is_that_of_the_whole_step(kit, name, dtype, bound):
    policy = kit.tiny_policy(dtype)
    rows = _with_mild_rollout_logprobs(policy, kit.random_rows(4, seed=5, dtype=dtype, masked=(2,)))
    rig = kit.Rig(policy, kit.config(**SETTINGS[name], micro_batch_tokens=30), centre=0.45)
    whole = rig.gradient([rows])
    errors = [kit.relative_error(rig.gradient(chunks), whole) for chunks in kit.partitions(rows)]
    assert len(errors) == 15
    assert max(errors) <= bound


@pytest.mark.parametrize("kind", ["truncated", "sequence", "icepop", "sequence_mask"])
def test_the_bounds_bite(kit, kind):
    """Some tokens of those rows are outside of the bounds and others are not, or nothing would be tested above."""
    policy = kit.tiny_policy()
    rows = _with_mild_rollout_logprobs(policy, kit.random_rows(4, seed=5, masked=(2,)))
    stats = kit.Rig(policy, kit.config(**WEIGHTS[kind])).step([rows])
    assert 0 < stats.out_of_bounds_fraction < 1
    masks = kind in ("icepop", "sequence_mask")
    assert stats.importance_masked_fraction == (stats.out_of_bounds_fraction if masks else 0.0)


def test_the_order_of_the_chunks_does_not_matter(kit):
    """All 75 ordered partitions of four rows, one of them masked: `batch` takes its origin from the first chunk."""
    rows = kit.random_rows(4, seed=5, masked=(2,))
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="batch", micro_batch_tokens=1000))
    whole = rig.gradient([rows])
    errors = [kit.relative_error(rig.gradient(chunks), whole) for chunks in kit.ordered_partitions(rows)]
    assert len(errors) == 75
    assert max(errors) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_critic_gradient_is_that_of_the_whole_step(kit, dtype, bound, clip):
    rows = kit.random_rows(4, seed=6, dtype=dtype, masked=(0,))
    rig = kit.Rig(kit.tiny_critic(dtype), kit.config(value_clip_eps=clip))
    whole = rig.gradient([rows])
    errors = [kit.relative_error(rig.gradient(chunks), whole) for chunks in kit.partitions(rows)]
    assert len(errors) == 15
    assert max(errors) <= bound


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["running", "batch"])
def test_random_ragged_batches(kit, seed, mode):
    """Five rows with one, two or three masked ones, and a chunk order that may begin with a masked chunk."""
    rows = kit.random_rows(5, seed=100 + seed, dtype=torch.float32, masked=range(seed % 3 + 1))
    rig = kit.Rig(kit.tiny_policy(torch.float32), kit.config(normalize_advantages=mode), centre=-0.3)
    whole = rig.gradient([rows])
    for sizes in ([1, 1, 1, 1, 1], [1, 4], [2, 1, 2], [3, 2], [4, 1]):
        chunks = [list(part) for part in torch.tensor(range(5)).split(sizes)]
        streamed = rig.gradient([[rows[i] for i in part] for part in chunks])
        assert kit.relative_error(streamed, whole) <= 1e-6


@pytest.mark.parametrize("mode", ["off", "running", "batch"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_statistics_do_not_depend_on_the_chunks(kit, mode, kind):
    policy = kit.tiny_policy()
    rows = _with_mild_rollout_logprobs(policy, kit.random_rows(4, seed=5, masked=(2,)))
    settings = kit.config(normalize_advantages=mode, entropy_coef=0.1, **WEIGHTS[kind])
    rig = kit.Rig(policy, settings, centre=0.2)
    whole = dataclasses.asdict(rig.step([rows]))
    for chunks in kit.partitions(rows):
        streamed = dataclasses.asdict(rig.step(chunks))
        assert streamed == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert whole["ratio_mean"] == 1.0
    assert whole["num_tokens"] == sum(int(row.mask.sum()) for row in rows)
    assert whole["num_sequences"] == 3


def test_chunk_mode_depends_on_the_boundaries(kit):
    """What `chunk` is documented to do, and what the other modes are there to avoid."""
    rows = kit.random_rows(4, seed=8)
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="chunk"))
    whole = rig.gradient([rows])
    assert kit.relative_error(rig.gradient([rows[:2], rows[2:]]), whole) > 0.01


def test_without_any_ratio_of_one_off_stays_exact(kit):
    """Old log-probs of the engine with an active clip: not linear in the advantage, yet a plain sum over tokens."""
    rows = kit.random_rows(4, seed=9)
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="off", old_logprobs="rollout", dual_clip=3.0))
    whole = rig.gradient([rows])
    assert rig.step([rows]).clip_fraction > 0
    for chunks in kit.partitions(rows):
        assert kit.relative_error(rig.gradient(chunks), whole) <= 1e-12
