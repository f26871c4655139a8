"""The critic's values: which position they come from, and what they do not depend on."""

import pytest
import torch

from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.micro_batch import collate

CPU = torch.device("cpu")


def _batch(rows):
    return collate(rows, range(len(rows)), CPU)


def _full_values(model, row):
    ids = torch.cat([row.prompt_ids, row.response_ids])
    return model(input_ids=ids[None]).logits[0, :, 0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_values_are_those_of_the_states_before_the_tokens(kit, name):
    model = kit.token_classifier(name)
    rows = kit.ragged(6, seed=11)
    values, final = CriticModel(model)(_batch(rows))
    assert values.dtype == final.dtype == torch.float32
    for i, row in enumerate(rows):
        full = _full_values(model, row)
        length = len(row.response_ids)
        before = torch.where(row.response_mask, full[len(row.prompt_ids) - 1 : -1], 0.0)
        torch.testing.assert_close(values[i, :length], before, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(final[i], full[-1], rtol=1e-5, atol=1e-5)
        assert not values[i, length:].any()


class _OneHot(torch.nn.Module):
    """A critic whose value at a position is a weighted count of all tokens up to it: f(prefix), by construction."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(float(vocabulary)))

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.weight[input_ids].cumsum(1)[..., None]})


def test_alignment_on_one_hot_positions(kit):
    """ROLL af516d73, with numbers: prompt 1, 2 and response 3, 4, 5."""
    rows = [kit.trajectory([1, 2], [3, 4, 5]), kit.trajectory([7], [8])]
    values, final = CriticModel(_OneHot(kit.VOCABULARY))(_batch(rows))
    assert values.tolist() == [[3.0, 6.0, 10.0], [7.0, 0.0, 0.0]]
    assert final.tolist() == [15.0, 15.0]


def test_company_does_not_matter(kit):
    critic = CriticModel(kit.token_classifier("gpt2"))
    rows = [*kit.ragged(5, seed=12), kit.trajectory([3] * 9, [4, 0, 5] * 6, name="long")]
    values, final = critic(_batch(rows))
    for i, row in enumerate(rows):
        alone, last = critic(collate(rows, [i], CPU))
        torch.testing.assert_close(values[i, : len(row.response_ids)], alone[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(final[i], last[0], rtol=1e-5, atol=1e-5)


def test_gradient_reaches_generated_tokens_only(kit):
    """Values at masked positions are constants, whatever a loss does with them."""
    model = kit.token_classifier("gpt2", torch.float64)
    rows = kit.ragged(4, seed=13)
    values, _ = CriticModel(model)(_batch(rows))
    ours = torch.autograd.grad(values.square().sum(), model.classifier.weight)[0]
    exact = sum(
        _full_values(model, row)[len(row.prompt_ids) - 1 : -1][row.response_mask].square().sum() for row in rows
    )
    theirs = torch.autograd.grad(exact, model.classifier.weight)[0]
    torch.testing.assert_close(ours, theirs)


def test_always_in_evaluation_mode(kit):
    critic = CriticModel(kit.token_classifier("llama"))
    # the head of Hugging Face's token classifiers has dropout of its own
    assert critic.model.dropout.p > 0
    torch.nn.Sequential(critic).train()
    batch = _batch(kit.ragged(3))
    assert torch.equal(critic(batch)[0], critic(batch)[0])


def test_a_bfloat16_critic_gives_float32(kit):
    values, final = CriticModel(kit.token_classifier("llama", torch.bfloat16))(_batch(kit.ragged(2)))
    assert values.dtype == final.dtype == torch.float32
