"""Gradients of earlier chunks survive whatever happens between chunks; graphs do not outlive their micro-batch."""

import weakref

import pytest
import torch

from lightning_ppo.errors import UpdateInProgressError


def _offload(rig):
    for parameter in rig.model.parameters():
        parameter.data = parameter.data.clone()


def _zero_grad_to_none(rig):
    rig.model.zero_grad(set_to_none=True)


def _zero_grad_in_place(rig):
    for parameter in rig.model.parameters():
        assert parameter.grad is None
    rig.model.zero_grad(set_to_none=False)


def _evaluate(rig, kit):
    rig.model.eval()
    with torch.no_grad():
        rig.model.model(input_ids=torch.randint(2, kit.VOCABULARY, (3, 5)))
    rig.model.train()


def _foreign_backward(rig, kit):
    """Somebody's own backward pass through the same parameters, with `.grad` left behind."""
    rig.model.model(input_ids=torch.randint(2, kit.VOCABULARY, (3, 5))).logits.sum().backward()


def _refused_release(rig):
    with pytest.raises(UpdateInProgressError, match="would lose the open PPO step"):
        rig.accumulator.release()


EVENTS = {
    "offload": lambda rig, kit: _offload(rig),
    "zero_grad to None": lambda rig, kit: _zero_grad_to_none(rig),
    "zero_grad in place": lambda rig, kit: _zero_grad_in_place(rig),
    "evaluation": _evaluate,
    "backward of somebody else": _foreign_backward,
    "destructive offload": lambda rig, kit: _refused_release(rig),
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [("policy", torch.float64), ("policy", torch.bfloat16), ("critic", torch.float32)]
)
@pytest.mark.parametrize("name", EVENTS)
def test_between_chunks(kit, name, kind, dtype):
    """NeMo RL 3660: only the last chunk survived, while the count was that of all."""
    rows = kit.random_rows(6, seed=51)
    model = kit.tiny_policy(dtype) if kind == "policy" else kit.tiny_critic(dtype)
    rig = kit.Rig(model, kit.config(entropy_coef=0.1))
    chunks = [rows[:2], rows[2:4], rows[4:]]
    wanted = rig.gradient(chunks)
    rig.between_chunks = lambda: EVENTS[name](rig, kit)
    assert torch.equal(rig.gradient(chunks), wanted)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_last_chunk_without_rows_or_weight(kit, kind):
    """SkyRL 2008: each chunk zeroed the gradients, and an empty last one erased the update."""
    rows = kit.random_rows(5, seed=52, masked=(4,))
    rig = kit.Rig(kit.tiny_policy() if kind == "policy" else kit.tiny_critic(), kit.config())
    wanted = rig.gradient([rows[:2], rows[2:4]])
    assert torch.equal(rig.gradient([rows[:2], rows[2:4], rows[4:]]), wanted)
    assert torch.equal(rig.gradient([rows[:2], rows[2:4], ()]), wanted)


def test_one_optimizer_step_for_all_chunks(kit):
    """open-instruct 1498: no backward pass is taken for a boundary."""
    rows = kit.random_rows(5, seed=53)
    rig = kit.Rig(kit.tiny_policy(), kit.config(micro_batch_tokens=1))
    rig.step([[row] for row in rows])
    assert rig.backward_passes == 5
    assert len(rig.gradients) == 1
    assert all(parameter.grad is None for parameter in rig.model.parameters())


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("mode", ["running", "batch"])
def test_no_graph_outlives_its_micro_batch(kit, kind, mode):
    """verl 6699: outputs kept for the metrics retained one graph per micro-batch."""
    model = kit.tiny_policy() if kind == "policy" else kit.tiny_critic()
    states, alive_before = [], []

    def remember(module, arguments, output):
        alive_before.append(sum(state() is not None for state in states))
        states.append(weakref.ref(output.last_hidden_state))

    rows = kit.random_rows(4, seed=54)
    with torch.no_grad():
        model(_collated(rows))
    handle = model.model.base_model.register_forward_hook(remember)
    rig = kit.Rig(model, kit.config(normalize_advantages=mode, entropy_coef=0.1, micro_batch_tokens=1))
    rig.step([rows[:2], rows[2:]])
    handle.remove()
    assert len(states) == 4
    assert alive_before == [0, 0, 0, 0]
    assert all(state() is None for state in states)


def _collated(rows):
    from lightning_ppo.models.micro_batch import collate

    return collate([row.trajectory for row in rows], [0], torch.device("cpu"))
