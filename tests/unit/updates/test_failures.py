"""A step that cannot be completed says why, calls no optimizer, and leaves no trace in the next one."""

import dataclasses
import re

import pytest
import torch

from lightning_ppo.errors import StepError, UpdateInProgressError
from lightning_ppo.ranks import Ranks
from lightning_ppo.step_metrics import critic_metrics


def _model(kit, kind):
    return (kit.tiny_policy if kind == "policy" else kit.tiny_critic)(torch.float32)


def _rows_with_a_rare_token(kit):
    """Only the response of the third row holds token 10."""
    rows = []
    for index, row in enumerate(kit.random_rows(4, seed=61, dtype=torch.float32)):
        t = row.trajectory
        prompt = torch.where(t.prompt_ids == 10, 9, t.prompt_ids)
        response = torch.where(t.response_ids == 10, 9, t.response_ids)
        if index == 2:
            prompt[0] = 10
        rows.append(
            dataclasses.replace(row, trajectory=dataclasses.replace(t, prompt_ids=prompt, response_ids=response))
        )
    return rows


@pytest.mark.parametrize("mode", ["running", "batch", "off"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_poisoned_parameter(kit, kind, poison, mode):
    rows = _rows_with_a_rare_token(kit)
    model = _model(kit, kind)
    settings = kit.config(normalize_advantages=mode, micro_batch_tokens=1)
    wanted = kit.Rig(model, settings).gradient([rows[:2], rows[2:]])
    rig = kit.Rig(model, settings)
    embedding = model.model.get_input_embeddings().weight
    healthy = embedding.detach().clone()
    with torch.no_grad():
        embedding[10] = poison
    with pytest.raises(StepError, match=rf"^{kind} loss is nan in PPO step 3 chunk 1, samples s2$"):
        rig.step([rows[:2], rows[2:]])
    assert rig.gradients == []
    assert rig.accumulator.is_open
    rig.update.abort()
    rig.update.abort()
    assert not rig.accumulator.is_open
    with torch.no_grad():
        embedding.copy_(healthy)
    # the NaN that the failed step left in the buffers is gone
    assert torch.equal(rig.gradient([rows[:2], rows[2:]]), wanted)


@pytest.mark.parametrize(("kind", "field"), [("policy", "advantages"), ("critic", "returns")])
def test_a_poisoned_number(kit, kind, field):
    rows = list(kit.random_rows(4, seed=62, dtype=torch.float32))
    poisoned = getattr(rows[1], field).clone()
    poisoned[rows[1].mask] = float("inf")
    rows[1] = dataclasses.replace(rows[1], **{field: poisoned})
    rig = kit.Rig(_model(kit, kind), kit.config(normalize_advantages="off", micro_batch_tokens=1))
    with pytest.raises(StepError, match=r"loss is -?inf in PPO step 3 chunk 0, samples s1$"):
        rig.step([rows])
    assert rig.gradients == []


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_under_a_finite_loss(kit, kind):
    rows = kit.random_rows(3, seed=63, dtype=torch.float32)
    model = _model(kit, kind)
    rig = kit.Rig(model, kit.config())
    handle = next(model.parameters()).register_hook(lambda grad: torch.full_like(grad, float("nan")))
    with pytest.raises(
        StepError, match=rf"^{kind} gradient is not finite after PPO step 3 chunk 0, samples s0, s1; look at "
    ):
        rig.step([rows[:2], rows[2:]])
    handle.remove()
    assert rig.gradients == []
    rig.update.abort()
    assert torch.isfinite(rig.gradient([rows])).all()


def test_a_gradient_that_overflows_in_the_sum_over_ranks(kit):
    def overflow(tensor):
        if tensor.dtype == torch.float32:
            tensor.fill_(float("inf"))

    rows = kit.random_rows(2, seed=64, dtype=torch.float32)
    rig = kit.Rig(_model(kit, "policy"), kit.config(max_grad_norm=1.0), ranks=Ranks(0, 2, overflow))
    rig.update.begin()
    rig.update.train_chunk(rows, rig.normalizer.plan(rows, is_only_chunk=False), "chunk")
    with pytest.raises(StepError, match="policy gradient norm is inf after the sum over ranks"):
        rig.update.finish({"main": 1.0})
    assert rig.gradients == []
    assert all(parameter.grad is None for parameter in rig.model.parameters())
    rig.update.abort()
    rig.update.begin()


def test_an_error_names_a_few_samples_of_many(kit):
    rows = kit.random_rows(7, seed=71, dtype=torch.float32)
    rig = kit.Rig(_model(kit, "policy"), kit.config())
    next(rig.model.parameters()).register_hook(lambda grad: torch.full_like(grad, float("nan")))
    with pytest.raises(StepError, match=r"chunk 0, samples s0, s1, s2, s3 and 3 more;"):
        rig.step([rows])


@pytest.mark.parametrize("kind", ["policy", "critic"])
class TestScores:
    def test_of_a_model_that_has_diverged(self, kit, kind):
        rows = kit.random_rows(3, seed=72, dtype=torch.float32)
        rig = kit.Rig(_model(kit, kind), kit.config())
        rig.update.check_scores(rows, "step 3")
        shortest = min(rows, key=lambda row: row.trajectory.num_tokens).trajectory.sample_id
        with torch.no_grad():
            next(rig.model.parameters()).fill_(float("inf"))
        with pytest.raises(StepError, match=rf"^the {kind} has diverged: what it gives to sample {shortest} is not "):
            rig.update.check_scores(rows, "step 3")
        assert rig.backward_passes == 0

    def test_of_another_rank_end_this_one_too(self, kit, kind):
        """One without rows of its own as well: it must not wait for ranks that have left."""
        rows = kit.random_rows(3, seed=73, dtype=torch.float32)
        ranks = Ranks(0, 2, lambda tensor: tensor.add_(1.0))
        rig = kit.Rig(_model(kit, kind), kit.config(), ranks=ranks)
        for mine in (rows, ()):
            with pytest.raises(StepError, match=f"^the {kind} has diverged on another rank after step 3; see its err"):
                rig.update.check_scores(mine, "step 3")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["running", "batch", "chunk", "off"])
def test_a_wholly_masked_policy_step(kit, mode, level):
    """ROLL 620cc0c9: never a fall back to the rows without their mask; the zero loss of no token is not an update."""
    rows = kit.random_rows(3, seed=65, masked=(0, 1, 2))
    rig = kit.Rig(kit.tiny_policy(), kit.config(normalize_advantages=mode, loss_level=level))
    for chunks in ([rows], [rows[:1], rows[1:]]):
        with pytest.raises(StepError, match="no trained token on any rank; nothing was updated"):
            rig.step(chunks)
        rig.update.abort()
    assert rig.gradients == []
    assert rig.backward_passes == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_wholly_masked_policy_minibatch(kit, level):
    """One of several minibatches may be all masked, as the critic's: it is passed over."""
    masked = kit.random_rows(3, seed=68, masked=(0, 1, 2))
    rows = kit.random_rows(3, seed=69)
    settings = kit.config(normalize_advantages="off", loss_level=level, policy_minibatches=2, old_logprobs="rollout")
    masked, rows = (
        [dataclasses.replace(row, old_logprobs=row.trajectory.rollout_logprobs) for row in some]
        for some in (masked, rows)
    )
    rig = kit.Rig(kit.tiny_policy(), settings)
    assert rig.step([masked]) is None
    assert rig.gradients == []
    assert torch.equal(rig.gradient([rows]), kit.Rig(kit.tiny_policy(), settings).gradient([rows]))


def test_skipped_critic_updates_are_in_no_mean(kit):
    rig = kit.Rig(kit.tiny_critic(), kit.config())
    skipped = rig.step([kit.random_rows(3, seed=66, masked=(0, 1, 2))])
    first, second = rig.step([kit.random_rows(3, seed=67)]), rig.step([kit.random_rows(1, seed=70)])
    metrics = critic_metrics([(skipped, first), (first, skipped, second)])
    assert (metrics["critic/loss"], metrics["critic/grad_norm"]) == (first.loss, first.grad_norm)
    tokens = first.num_tokens + second.num_tokens
    expected = (first.num_tokens * first.loss + second.num_tokens * second.loss) / tokens
    assert metrics["critic/loss_last_epoch"] == pytest.approx(expected, rel=1e-12)
    assert metrics["critic/grad_norm_last_epoch"] == pytest.approx((first.grad_norm + second.grad_norm) / 2)
    assert critic_metrics([]) == critic_metrics([(skipped,)]) == {}


def test_a_wholly_masked_critic_minibatch(kit):
    """One of several minibatches may be all masked: it is passed over, and the next one is as if it had not been."""
    masked = kit.random_rows(3, seed=66, masked=(0, 1, 2))
    rows = kit.random_rows(3, seed=67)
    rig = kit.Rig(kit.tiny_critic(), kit.config())
    assert rig.step([masked]).num_tokens == 0
    assert rig.gradients == []
    wanted = kit.Rig(kit.tiny_critic(), kit.config()).gradient([rows])
    assert torch.equal(rig.gradient([rows]), wanted)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_begin_twice(kit, kind):
    rig = kit.Rig(_model(kit, kind), kit.config())
    rig.update.begin()
    with pytest.raises(UpdateInProgressError, match="finish or abort it"):
        rig.update.begin()


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_train_chunk_without_begin(kit, kind):
    rows = kit.random_rows(2, seed=68, dtype=torch.float32)
    rig = kit.Rig(_model(kit, kind), kit.config())
    more = (rig.normalizer.plan(rows, is_only_chunk=True),) if kind == "policy" else ()
    with pytest.raises(UpdateInProgressError, match="call begin"):
        rig.update.train_chunk(rows, *more, "chunk")
    assert rig.backward_passes == 0


def test_a_backward_pass_that_raises_leaves_no_grad(kit):
    """Otherwise a later zero_grad in place would write through a view into the buffer."""
    rows = kit.random_rows(2, seed=69)
    rig = kit.Rig(kit.tiny_policy(), kit.config())

    def fail(grad):
        raise RuntimeError("out of memory")

    handle = list(rig.model.parameters())[-1].register_hook(fail)
    with pytest.raises(RuntimeError, match=re.escape("out of memory")):
        rig.step([rows])
    handle.remove()
    assert all(parameter.grad is None for parameter in rig.model.parameters())
    rig.update.abort()
    assert torch.equal(rig.gradient([rows]), kit.Rig(kit.tiny_policy(), kit.config()).gradient([rows]))
