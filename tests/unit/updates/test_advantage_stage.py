"""From trajectories to rows: alignment of values and log-probs, temperature, masks, rewards, bootstrap."""

import dataclasses

import pytest
import torch

from lightning_ppo.batch import Chunk
from lightning_ppo.residency import Residency
from lightning_ppo.timing import PhaseTimer
from lightning_ppo.updates.advantage_stage import AdvantageStage


def _chunk(trajectories):
    return Chunk(0, 0, tuple(trajectories), (0,), 1, 1, wait_s=0.0, generation_s=(0.0,))


def _stage(kit, config=None, *, dtype=torch.float64, reference=None, temperature=1.0, **changes):
    residency = Residency(torch.device("cpu"))
    policy, critic = kit.tiny_policy(dtype, temperature), kit.tiny_critic(dtype)
    for name, model in (("policy", policy), ("critic", critic), ("reference", reference)):
        if model is not None:
            residency.add(name, model)
    return AdvantageStage(policy, critic, reference, config or kit.config(**changes), residency, PhaseTimer())


def _trajectories(kit, count=5, seed=71, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [kit.random_trajectory(generator, f"s{i}", dtype) for i in range(count)]


def _engine_logprobs(policy, trajectory, temperature):
    """What an engine reports that samples from softmax(logits / temperature)."""
    ids = torch.cat([trajectory.prompt_ids, trajectory.response_ids])
    logits = policy.model(input_ids=ids[None]).logits[0, len(trajectory.prompt_ids) - 1 : -1].detach()
    table = torch.log_softmax(logits / temperature, -1)
    values = table.gather(-1, trajectory.response_ids[:, None])[:, 0]
    return torch.where(trajectory.response_mask, values, 0.0)


def test_a_value_is_that_of_the_state_before_its_token(kit):
    """ROLL af516d73: V[t] is a function of the tokens before t, and of those only."""
    stage = _stage(kit)
    trajectories = [dataclasses.replace(t, response_mask=t.response_mask | True) for t in _trajectories(kit)]
    rows = stage.run(_chunk(trajectories))
    for row in rows:
        t = row.trajectory
        for position in range(len(t.response_ids)):
            prefix = torch.cat([t.prompt_ids, t.response_ids[:position]])
            alone = stage.critic.model(input_ids=prefix[None]).logits[0, -1, 0].detach()
            assert float(row.values[position]) == pytest.approx(float(alone), rel=1e-12)
            changed = t.response_ids.clone()
            changed[position] = (changed[position] + 1) % kit.VOCABULARY
            other = stage.run(_chunk([dataclasses.replace(t, response_ids=changed)]))[0]
            torch.testing.assert_close(other.values[: position + 1], row.values[: position + 1], rtol=1e-12, atol=1e-12)
            assert (other.values[position + 1 :] != row.values[position + 1 :]).all()


def test_returns_carry_the_reward_and_advantages_what_the_critic_missed(kit):
    """With gamma = lambda = 1, terminal value 0: every return is the reward, also across an environment's tokens."""
    rows = _stage(kit).run(_chunk(_trajectories(kit)))
    assert any(not row.mask.all() for row in rows)
    for row in rows:
        assert torch.equal(row.mask, row.trajectory.response_mask)
        wanted = torch.where(row.mask, row.trajectory.reward, torch.zeros_like(row.returns))
        torch.testing.assert_close(row.returns, wanted)
        torch.testing.assert_close(row.advantages, torch.where(row.mask, wanted - row.values, 0.0))
        assert row.old_logprobs is None
        assert row.ref_logprobs is None


def test_rows_do_not_depend_on_the_micro_batches(kit):
    """Order of the rows is kept, although micro-batches are sorted by length."""
    trajectories = _trajectories(kit, 7)
    reference = kit.tiny_policy()
    settings = {"ppo_epochs": 2, "gae_lambda": 0.8, "kl_placement": "reward", "kl_coef": 0.1}
    alone = _stage(kit, reference=reference, micro_batch_tokens=1, **settings).run(_chunk(trajectories))
    together = _stage(kit, reference=reference, micro_batch_tokens=10_000, **settings).run(_chunk(trajectories))
    for one, other, trajectory in zip(alone, together, trajectories, strict=True):
        assert one.trajectory is other.trajectory is trajectory
        for name in ("values", "advantages", "returns", "old_logprobs", "ref_logprobs"):
            assert getattr(one, name).shape == trajectory.response_ids.shape
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_the_ratio_of_the_first_epoch_is_one(kit, temperature):
    """Temperature on the logits, on both sides (trl 4159, prime-rl 697): no mismatch with the engine, weights 1."""
    settings = kit.config(ppo_epochs=2, importance_correction="token", normalize_advantages="batch")
    stage = _stage(kit, settings, temperature=temperature)
    trajectories = [
        dataclasses.replace(t, rollout_logprobs=_engine_logprobs(stage.policy, t, temperature))
        for t in _trajectories(kit)
    ]
    rows = stage.run(_chunk(trajectories))
    stats = kit.Rig(stage.policy, settings).step([rows])
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-12)
    assert stats.approx_kl == pytest.approx(0.0, abs=1e-12)
    assert stats.sampler_mismatch_max < 1e-12
    assert stats.sampler_mismatch_kl == pytest.approx(0.0, abs=1e-12)
    assert stats.importance_weight_mean == pytest.approx(1.0, abs=1e-12)
    assert stats.clip_fraction == 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_dropout_is_off_in_every_pass(kit, temperature):
    """verl 4708: GPT-2 has dropout by default, and Lightning puts modules into training mode."""
    settings = kit.config(ppo_epochs=2, normalize_advantages="off")
    stage = _stage(kit, settings, temperature=temperature)
    assert stage.policy.model.config.resid_pdrop > 0
    torch.nn.ModuleList([stage.policy, stage.critic]).train()
    rows = stage.run(_chunk(_trajectories(kit)))
    for row in rows:
        exact = _engine_logprobs(stage.policy, row.trajectory, temperature)
        torch.testing.assert_close(row.old_logprobs, exact, rtol=1e-12, atol=1e-12)
    rig = kit.Rig(stage.policy, settings)
    assert rig.step([rows]).ratio_mean == pytest.approx(1.0, abs=1e-12)
    assert torch.equal(rig.gradient([rows]), rig.gradients[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_float32_whatever_the_model_is(kit, dtype):
    """slime 245: log-probs in bfloat16 are off by more than a clip range."""
    stage = _stage(kit, dtype=dtype, reference=kit.tiny_policy(dtype), ppo_epochs=2, kl_placement="reward", kl_coef=0.1)
    for row in stage.run(_chunk(_trajectories(kit, dtype=torch.float32))):
        for name in ("values", "advantages", "returns", "old_logprobs", "ref_logprobs"):
            assert getattr(row, name).dtype == torch.float32


def _truncate(trajectories, which):
    return [dataclasses.replace(t, finish_reason="length") if i in which else t for i, t in enumerate(trajectories)]


def test_truncated_responses_can_be_masked(kit):
    trajectories = _truncate(_trajectories(kit), {1, 3})
    rows = _stage(kit, truncated_responses="mask").run(_chunk(trajectories))
    assert [bool(row.mask.any()) for row in rows] == [True, False, True, False, True]
    for row in (rows[1], rows[3]):
        assert not row.advantages.any()
        assert not row.returns.any()


def test_truncated_responses_can_be_penalised(kit):
    trajectories = _truncate(_trajectories(kit), {1})
    kept = _stage(kit).run(_chunk(trajectories))
    rows = _stage(kit, truncated_responses="penalize", truncation_penalty=0.25).run(_chunk(trajectories))
    for index, (row, before) in enumerate(zip(rows, kept, strict=True)):
        shift = 0.25 if index == 1 else 0.0
        torch.testing.assert_close(row.returns, torch.where(row.mask, before.returns - shift, 0.0))
        assert row.trajectory.reward == before.trajectory.reward


def test_only_truncated_responses_bootstrap(kit):
    """RLinf 661: a response that ended has no future, one that was cut off has the critic's value of its last state."""
    trajectories = _truncate(_trajectories(kit), {0, 2})
    stage = _stage(kit, bootstrap_truncated=True, gamma=0.9)
    plain = _stage(kit, gamma=0.9).run(_chunk(trajectories))
    for index, (row, before) in enumerate(zip(stage.run(_chunk(trajectories)), plain, strict=True)):
        t = row.trajectory
        ids = torch.cat([t.prompt_ids, t.response_ids])
        last = float(stage.critic.model(input_ids=ids[None]).logits[0, -1, 0].detach()) if index in (0, 2) else 0.0
        # the last valid token is one step away from the end, the one before it two
        steps = row.mask.flip(0).cumsum(0).flip(0).double()
        torch.testing.assert_close(row.returns, torch.where(row.mask, before.returns + 0.9**steps * last, 0.0))


def test_kl_in_the_reward(kit):
    """Charged on trained tokens only (slime 1372), with the log-probs before the update."""
    reference = kit.tiny_policy(initializer_range=0.1)
    stage = _stage(kit, reference=reference, kl_placement="reward", kl_coef=0.3, kl_type="k1")
    for row in stage.run(_chunk(_trajectories(kit))):
        t = row.trajectory
        gap = _engine_logprobs(stage.policy, t, 1.0) - _engine_logprobs(reference, t, 1.0)
        charged = torch.where(row.mask, 0.3 * gap, 0.0)
        to_come = charged.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(row.returns, torch.where(row.mask, t.reward - to_come, 0.0))
        torch.testing.assert_close(row.ref_logprobs, _engine_logprobs(reference, t, 1.0))


def test_old_logprobs_of_the_engine_are_passed_on(kit):
    rows = _stage(kit, old_logprobs="rollout", normalize_advantages="off").run(_chunk(_trajectories(kit)))
    assert all(torch.equal(row.old_logprobs, row.trajectory.rollout_logprobs) for row in rows)


@pytest.mark.parametrize("epochs", [1, 2])
def test_old_logprobs_of_the_engine_leave_the_kl_to_the_trainer(kit, epochs):
    """KL in the reward compares policy and reference; what the engine reported has no place in it."""
    settings = {"kl_placement": "reward", "kl_coef": 0.3, "ppo_epochs": epochs, "normalize_advantages": "batch"}
    recomputed, reported = (
        _stage(kit, reference=kit.tiny_policy(initializer_range=0.1), old_logprobs=old, **settings).run(
            _chunk(_trajectories(kit))
        )
        for old in ("recompute", "rollout")
    )
    for one, other in zip(recomputed, reported, strict=True):
        assert torch.equal(one.returns, other.returns)
        assert torch.equal(other.old_logprobs, other.trajectory.rollout_logprobs)
        assert (one.old_logprobs is None) == (epochs == 1)


def test_turns_on_the_device(kit):
    """Values first, since the critic was made resident while the chunk was awaited; no pass without need."""
    plain = _stage(kit)
    plain.run(_chunk(_trajectories(kit)))
    assert plain.residency.ledger == [("load", "critic")]
    full = _stage(kit, reference=kit.tiny_policy(), ppo_epochs=2, kl_placement="reward", kl_coef=0.1)
    full.residency.acquire("critic")
    full.run(_chunk(_trajectories(kit)))
    assert [name for action, name in full.residency.ledger if action == "load"] == ["critic", "reference", "policy"]


def test_inputs_are_left_alone(kit):
    """slime 2114: a reward that is changed in place corrupts what is logged."""
    trajectories = _trajectories(kit)
    copies = [{f.name: getattr(t, f.name) for f in dataclasses.fields(t)} for t in trajectories]
    copies = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in c.items()} for c in copies]
    _stage(kit, reference=kit.tiny_policy(), kl_placement="reward", kl_coef=0.3).run(_chunk(trajectories))
    for trajectory, copy in zip(trajectories, copies, strict=True):
        for name, value in copy.items():
            now = getattr(trajectory, name)
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value


def test_an_empty_share(kit):
    """A rank may have no rows of a chunk."""
    assert _stage(kit).run(_chunk([])) == ()
