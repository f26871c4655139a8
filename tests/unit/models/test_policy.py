"""Log-probs and entropies of the policy against the model's own forward pass."""

import pytest
import torch

from lightning_ppo.models import policy as policy_module
from lightning_ppo.models.micro_batch import collate
from lightning_ppo.models.policy import PolicyModel

CPU = torch.device("cpu")
FAMILIES = ["llama", "tied llama", "gpt2", "gemma2", "cohere"]


def _batch(rows):
    return collate(rows, range(len(rows)), CPU)


def _gradient(output, model):
    grads = torch.autograd.grad(output, list(dict.fromkeys(model.parameters())))
    return torch.cat([g.reshape(-1) for g in grads])


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.8])
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_and_entropies(kit, name, temperature):
    """Padding, holes and the rows' order aside, it is log_softmax of the full logits over the temperature."""
    model = kit.causal_lm(name)
    rows = kit.ragged(6)
    policy = PolicyModel(model, temperature)
    logprobs, entropy = policy(_batch(rows), with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    for i, row in enumerate(rows):
        exact, exact_entropy = kit.full_logprobs(model, row, temperature)
        length = len(row.response_ids)
        torch.testing.assert_close(logprobs[i, :length].double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[i, :length].double(), exact_entropy, rtol=1e-5, atol=1e-5)
        assert not logprobs[i, :length][~row.response_mask].any()
        assert not logprobs[i, length:].any()
        assert not entropy[i, length:].any()


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_gradient(kit, name):
    """Of log-probs and entropies, against autograd through the full logits of each row."""
    model = kit.causal_lm(name, torch.float64)
    rows = kit.ragged(4, seed=2)
    logprobs, entropy = PolicyModel(model, 0.7)(_batch(rows), with_entropy=True)
    ours = _gradient(logprobs.sum() + 0.3 * entropy.sum(), model)
    exact = [kit.full_logprobs(model, row, 0.7) for row in rows]
    theirs = _gradient(sum(p.sum() + 0.3 * e.sum() for p, e in exact), model)
    # Gemma's norms compute in float32
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12 if name == "gpt2" else 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens_per_slice", [1, 3])
def test_slices_of_the_logits(kit, name, tokens_per_slice, monkeypatch):
    model = kit.causal_lm(name)
    rows = kit.ragged(5, seed=3)
    policy = PolicyModel(model, 0.8)

    def run():
        logprobs, entropy = policy(_batch(rows), with_entropy=True)
        loss = (logprobs * torch.linspace(0.5, 2, logprobs.shape[1])).sum() + 0.3 * entropy.sum()
        return logprobs.detach(), entropy.detach(), _gradient(loss, model)

    whole = run()
    monkeypatch.setattr(policy_module, "LOGITS_PER_SLICE", tokens_per_slice * kit.VOCABULARY)
    for sliced, wanted in zip(run(), whole, strict=True):
        torch.testing.assert_close(sliced, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        logprobs, none = policy(_batch(rows))
    assert none is None
    torch.testing.assert_close(logprobs, whole[0])


def test_slices_hold_their_logits_one_at_a_time(kit, monkeypatch):
    """The output layer never sees more tokens than one slice has, in the backward pass neither."""
    model = kit.causal_lm("llama")
    policy = PolicyModel(model)
    batch = _batch(kit.ragged(6, seed=4))
    policy(batch)
    monkeypatch.setattr(policy_module, "LOGITS_PER_SLICE", 4 * kit.VOCABULARY)
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    policy(batch)[0].sum().backward()
    handle.remove()
    tokens = int(batch.mask.sum())
    assert max(sizes) == 4
    # forward and again in backward
    assert sum(sizes) == 2 * tokens


def test_sliced_graph_can_be_used_twice(kit, monkeypatch):
    """`batch` normalisation makes two backward passes through the same forward pass."""
    monkeypatch.setattr(policy_module, "LOGITS_PER_SLICE", 2 * kit.VOCABULARY)
    model = kit.causal_lm("llama")
    total = PolicyModel(model)(_batch(kit.ragged(4)))[0].sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(total, parameters, retain_graph=True)
    second = torch.autograd.grad(total, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_company_does_not_matter(kit, name):
    """A row alone, and the same row padded beside a much longer one."""
    policy = PolicyModel(kit.causal_lm(name))
    rows = [*kit.ragged(5, seed=5), kit.trajectory([3] * 9, [4, 0, 5] * 6, name="long")]
    together = policy(_batch(rows))[0]
    for i, row in enumerate(rows):
        alone = policy(collate(rows, [i], CPU))[0][0]
        torch.testing.assert_close(together[i, : len(row.response_ids)], alone, rtol=1e-5, atol=1e-5)


def test_pad_and_stop_token_inside_a_response(kit):
    """TRL looked for the first pad token to find the end: here length comes from the row alone."""
    row = kit.trajectory([0, 3], [0, 1, 0, 4, 0, 0])
    model = kit.causal_lm("llama")
    logprobs, _ = PolicyModel(model)(_batch([row, kit.trajectory([2] * 5, [3] * 9)]))
    torch.testing.assert_close(logprobs[0, :6].double(), kit.full_logprobs(model, row)[0], rtol=1e-5, atol=1e-5)
    assert (logprobs[0, :6] < 0).all()


def test_a_batch_without_generated_tokens_keeps_its_graph(kit):
    """ROLL 3a7b01f9: a constant without a graph breaks the backward pass."""
    policy = PolicyModel(kit.causal_lm("llama"))
    logprobs, entropy = policy(_batch([kit.trajectory([2], [3, 4], [False, False])]), with_entropy=True)
    assert logprobs.requires_grad
    assert torch.equal(logprobs, torch.zeros(1, 2))
    (logprobs.sum() + entropy.sum()).backward()
    assert not any(p.grad is not None and p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize(("name", "is_last"), [("llama", True), ("gpt2", True), ("gemma2", False), ("cohere", False)])
def test_which_models_skip_the_full_logits(kit, name, is_last):
    model = kit.causal_lm(name)
    policy = PolicyModel(model)
    shapes = []
    head = model.get_output_embeddings()
    policy(_batch(kit.ragged(2)))
    handle = head.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].dim()))
    policy(_batch(kit.ragged(3, seed=1)))
    handle.remove()
    # `[N, d]` of the generated tokens, or the model's own `[b, S, d]`
    assert shapes == [2 if is_last else 3]


@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_a_head_that_is_zero_at_first(kit, name):
    """Zero logits look the same before and after a cap or a scale; after an update they do not."""
    model = kit.causal_lm(name, tie_word_embeddings=False)
    head = model.get_output_embeddings().weight
    trained = head.detach().clone()
    with torch.no_grad():
        head.zero_()
    policy = PolicyModel(model)
    row = kit.ragged(1)[0]
    policy(_batch([row]))
    with torch.no_grad():
        head.copy_(trained)
    logprobs = policy(_batch([row]))[0][0].double()
    torch.testing.assert_close(logprobs, kit.full_logprobs(model, row)[0], rtol=1e-5, atol=1e-5)


def test_always_in_evaluation_mode(kit):
    policy = PolicyModel(kit.causal_lm("gpt2"))
    assert policy.model.config.resid_pdrop > 0
    torch.nn.Sequential(policy).train()
    assert not any(module.training for module in policy.modules())
    batch = _batch(kit.ragged(3))
    assert torch.equal(policy(batch)[0], policy(batch)[0])


def test_a_bfloat16_model_gives_float32(kit):
    model = kit.causal_lm("llama", torch.bfloat16)
    row = kit.ragged(1, seed=6)[0]
    logprobs, entropy = PolicyModel(model)(_batch([row]), with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs[0].double(), kit.full_logprobs(model, row)[0], rtol=1e-5, atol=1e-5)


def test_completed_steps_travel_with_the_weights(kit):
    policy = PolicyModel(kit.causal_lm("llama"))
    policy.completed_steps.fill_(7)
    other = PolicyModel(kit.causal_lm("llama"))
    other.load_state_dict(policy.state_dict())
    assert int(other.completed_steps) == 7
