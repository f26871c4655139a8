"""Edges of the four ways to normalise, and what each costs in backward passes and buffers."""

import dataclasses

import pytest
import torch

from lightning_ppo.algorithms import RunningCentre
from lightning_ppo.ranks import Ranks
from lightning_ppo.updates.normalization import MAIN, REGULARIZER, UNIT, AdvantageNormalizer


def _with_advantages(rows, value):
    """The same rows with another advantage: a number, or a function of the old tensor."""
    changed = []
    for row in rows:
        new = value(row.advantages) if callable(value) else torch.full_like(row.advantages, value)
        changed.append(dataclasses.replace(row, advantages=torch.where(row.mask, new, torch.zeros_like(new))))
    return tuple(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("mode", ["running", "batch"])
def test_no_deviation_gives_exactly_no_gradient(kit, mode, sizes, dtype):
    rows = _with_advantages(kit.random_rows(4, seed=31, dtype=dtype), 0.3)
    # as the running mean would have it after many such steps
    centre = float(torch.tensor(0.3, dtype=dtype)) if mode == "running" else 0.0
    rig = kit.Rig(kit.tiny_policy(dtype), kit.config(normalize_advantages=mode), centre=centre)
    stats = rig.step(torch_split(rows, sizes))
    assert torch.equal(rig.gradients[-1], torch.zeros_like(rig.gradients[-1]))
    assert stats.grad_norm == 0.0


def test_no_deviation_leaves_the_regularizer(kit):
    """Only the advantages' part vanishes."""
    rows = _with_advantages(kit.random_rows(4, seed=31), 0.3)
    bare = kit.config(normalize_advantages="off", entropy_coef=0.1)
    wanted = kit.Rig(kit.tiny_policy(), bare).gradient([_with_advantages(rows, 0.0)])
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="batch", entropy_coef=0.1))
    assert kit.relative_error(rig.gradient([rows[:1], rows[1:]]), wanted) <= 1e-12


def torch_split(rows, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [rows[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _single_token_rows(kit, count):
    """Rows of which only the first `count` have a trained token, one each."""
    rows = kit.random_rows(4, seed=32)
    changed = []
    for index, row in enumerate(rows):
        mask = torch.zeros_like(row.mask)
        if index < count:
            mask[int(row.mask.nonzero()[0])] = True
        changed.append(dataclasses.replace(row, mask=mask))
    return tuple(changed)


@pytest.mark.parametrize("mode", ["running", "batch", "chunk"])
def test_one_valid_token_is_not_scaled(kit, mode):
    rows = _single_token_rows(kit, 1)
    plain = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="off"))
    wanted = plain.gradient([rows])
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages=mode))
    for chunks in ([rows], [rows[:2], rows[2:]], [rows[2:], rows[:2]]):
        assert kit.relative_error(rig.gradient(chunks), wanted) <= 1e-12


@pytest.mark.parametrize("mode", ["running", "batch"])
def test_two_tokens_in_two_chunks(kit, mode):
    """Each chunk alone has no deviation; the step has one."""
    rows = _single_token_rows(kit, 2)
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages=mode), centre=0.1)
    whole = rig.gradient([rows])
    assert whole.norm() > 0
    assert kit.relative_error(rig.gradient([rows[:1], rows[1:]]), whole) <= 1e-12


@pytest.mark.parametrize("mode", ["running", "batch", "off"])
def test_leading_chunks_without_a_valid_token(kit, mode):
    rows = kit.random_rows(5, seed=33, masked=(0, 1, 2))
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages=mode), centre=0.2)
    whole = rig.gradient([rows])
    for chunks in ([rows[:1], rows[1:3], rows[3:]], [rows[:3], rows[3:4], rows[4:]], [(), rows]):
        assert kit.relative_error(rig.gradient(chunks), whole) <= 1e-12


@pytest.mark.parametrize("offset", [1e2, 1e4])
@pytest.mark.parametrize("mode", ["running", "batch"])
def test_a_huge_common_offset_cancels(kit, mode, offset):
    """Advantages offset +- 1 in float32: what remains is their own rounding, not that of sums of `offset`.

    Measured against float64 arithmetic on the same float32 advantages and the same float32 model.
    """
    rows = kit.random_rows(6, seed=34, dtype=torch.float32)
    rows = _with_advantages(rows, lambda a: a + offset)
    exact_rows = [dataclasses.replace(r, advantages=r.advantages.double()) for r in rows]
    valid = torch.cat([r.advantages[r.mask] for r in exact_rows])
    centre = offset + 0.123 if mode == "running" else float(valid.mean())
    scale = 1 / torch.sqrt((valid - centre).square().sum() / (len(valid) - 1) + 1e-8)
    whitened = [dataclasses.replace(r, advantages=((r.advantages - centre) * scale).float()) for r in exact_rows]
    off = kit.Rig(kit.tiny_policy(torch.float32), kit.config(normalize_advantages="off"))
    exact = off.gradient([whitened])
    rig = kit.Rig(kit.tiny_policy(torch.float32), kit.config(normalize_advantages=mode), centre=centre)
    errors = [kit.relative_error(rig.gradient(c), exact) for c in ([rows], [rows[:2], rows[2:]], [[r] for r in rows])]
    assert max(errors) <= 1e-6


@pytest.mark.parametrize(
    ("mode", "chunks", "regularized", "passes", "buffers"),
    [
        ("off", 1, True, 1, {MAIN}),
        ("off", 3, True, 1, {MAIN}),
        ("chunk", 3, True, 1, {MAIN}),
        ("running", 1, True, 1, {MAIN}),
        ("running", 3, False, 1, {MAIN}),
        ("running", 3, True, 2, {MAIN, REGULARIZER}),
        ("batch", 1, False, 1, {MAIN}),
        ("batch", 1, True, 1, {MAIN}),
        ("batch", 3, False, 2, {MAIN, UNIT}),
        ("batch", 3, True, 3, {MAIN, UNIT, REGULARIZER}),
    ],
)
def test_cost(kit, mode, chunks, regularized, passes, buffers):
    """Backward passes per micro-batch, and gradient buffers: each is as large as the model."""
    rows = kit.random_rows(3, seed=35)
    settings = kit.config(normalize_advantages=mode, entropy_coef=0.1 * regularized, micro_batch_tokens=1)
    rig = kit.Rig(kit.tiny_policy(), settings)
    rig.step([rows] if chunks == 1 else [[row] for row in rows])
    assert rig.backward_passes == passes * 3
    assert set(rig.accumulator._buffers) == buffers


def test_running_centre_follows_the_mean_of_whole_steps(kit):
    normalizer = AdvantageNormalizer("running", 0.9, Ranks.single())
    means = []
    for seed in range(3):
        rows = kit.random_rows(4, seed=seed)
        normalizer.begin()
        for row in rows:
            plan = normalizer.plan([row], is_only_chunk=False)
            # the step's own advantages do not move the centre they are measured from
            assert plan.centre == normalizer.running.centre
        means.append(float(torch.cat([row.advantages[row.mask] for row in rows]).mean()))
        normalizer.commit()
        weights = [0.9 ** (seed - i) for i in range(seed + 1)]
        wanted = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
        assert normalizer.running.centre == pytest.approx(wanted, rel=1e-12)
    assert RunningCentre.from_state_dict(normalizer.running.state_dict()) == normalizer.running


def test_a_resumed_run_takes_its_own_decay(kit):
    """The centre goes on from where it was, known from as many steps."""
    saved = AdvantageNormalizer("running", 0.9, Ranks.single())
    for mean in (3.0, 5.0):
        saved.running = saved.running.updated(mean)
    same, other = (AdvantageNormalizer("running", decay, Ranks.single()) for decay in (0.9, 0.5))
    same.load_state_dict(saved.state_dict())
    assert same.running == saved.running
    other.load_state_dict(saved.state_dict())
    assert other.running.decay == 0.5
    assert other.running.centre == pytest.approx(saved.running.centre, rel=1e-12)
    # at that decay and step the new mean counts for 0.5 / (1 - 0.5 ** 3)
    expected = saved.running.centre + (9.0 - saved.running.centre) * 0.5 / (1 - 0.5**3)
    assert other.running.updated(9.0).centre == pytest.approx(expected, rel=1e-12)


def test_a_step_that_failed_does_not_move_the_centre(kit):
    normalizer = AdvantageNormalizer("running", 0.9, Ranks.single())
    normalizer.begin()
    normalizer.plan(kit.random_rows(2, seed=1), is_only_chunk=False)
    normalizer.begin()
    assert normalizer.running.centre == 0.0
    assert normalizer.moments.count == 0


def test_first_step_of_running_is_centred_on_zero(kit):
    rows = kit.random_rows(4, seed=36)
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="running"))
    valid = torch.cat([row.advantages[row.mask] for row in rows])
    scale = 1 / torch.sqrt(valid.square().sum() / (len(valid) - 1) + 1e-8)
    off = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages="off"))
    wanted = off.gradient([_with_advantages(rows, lambda a: a * scale)])
    assert kit.relative_error(rig.gradient([rows[:2], rows[2:]]), wanted) <= 1e-12
