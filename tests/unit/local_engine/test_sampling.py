import itertools
import math

import pytest
import torch

from lightning_ppo.rollout.local.sampling import RowRules, filter_logits, sample


def _rules(temperatures, top_k=None, top_p=None, vocab=7):
    count = len(temperatures)
    greedy = torch.tensor([t == 0 for t in temperatures])
    top_k, top_p = top_k or [0] * count, top_p or [1.0] * count
    filtered = [i for i in range(count) if (top_k[i] or top_p[i] < 1) and temperatures[i] > 0]
    return RowRules(
        temperature=torch.tensor([[t or 1.0] for t in temperatures]),
        greedy=greedy if greedy.any() else None,
        all_greedy=bool(greedy.all()),
        filtered=torch.tensor(filtered) if filtered else None,
        top_k=torch.tensor([[top_k[i] or vocab] for i in filtered]) if filtered else None,
        top_p=torch.tensor([[top_p[i]] for i in filtered], dtype=torch.float64) if filtered else None,
    )


def _brute_force(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities after the filters, one token at a time, in plain Python."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.7), (1, 1.0), (0, 1e-9), (99, 0.9)])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_every_token_and_logprob_follows_the_filtered_distribution(top_k, top_p, temperature) -> None:
    torch.manual_seed(3)
    row = torch.randn(7)
    expected = _brute_force(row.tolist(), temperature, top_k, top_p)
    count = 20_001
    uniforms = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1]
    rules = _rules([temperature] * count, [min(top_k, 7)] * count, [top_p] * count)
    tokens, logprobs = sample(row.expand(count, -1), rules, uniforms)
    share = torch.bincount(tokens, minlength=7) / count
    # Evenly spaced uniforms hit each token in proportion to its probability, up to one of them at each end.
    assert (share - torch.tensor(expected)).abs().max() < 2 / count
    assert logprobs.dtype == torch.float32
    for token in set(tokens.tolist()):
        assert abs(logprobs[tokens == token][0].item() - math.log(expected[token])) < 2e-6


def test_top_k_breaks_ties_by_id_and_keeps_exactly_k() -> None:
    kept = filter_logits(torch.zeros(1, 6), torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.float64)).isfinite()
    assert kept.tolist() == [[True, True, False, False, False, False]]


def test_greedy_takes_the_most_likely_token_at_temperature_one_and_ignores_filters() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7)
    tokens, logprobs = sample(logits, _rules([0, 0.5, 0], [1, 0, 0], [1.0, 1.0, 0.1]), torch.full((3,), 0.4).double())
    assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert torch.equal(logprobs[0], logits.log_softmax(-1)[0].max())


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extreme_uniforms_never_pick_an_impossible_token(uniform) -> None:
    for length, seed in itertools.product((5, 42, 1000), range(20)):
        logits = torch.randn(1, length, generator=torch.Generator().manual_seed(seed))
        logits[0, 0] = logits[0, -1] = -math.inf
        token, logprob = sample(logits, _rules([1.0], vocab=length), torch.tensor([uniform], dtype=torch.float64))
        assert 0 < token.item() < length - 1
        assert logprob.isfinite()


def test_filters_of_one_row_do_not_touch_the_bits_of_the_others() -> None:
    torch.manual_seed(1)
    logits, uniforms = torch.randn(9, 7), torch.rand(9, dtype=torch.float64)
    plain = sample(logits, _rules([1.0] * 9), uniforms)
    mixed = sample(
        logits, _rules([1.0] * 4 + [0.7, 0] + [1.0] * 3, [0] * 4 + [2] + [0] * 4, [1.0] * 8 + [0.3]), uniforms
    )
    same = [0, 1, 2, 3, 6, 7]
    assert torch.equal(plain[0][same], mixed[0][same])
    assert torch.equal(plain[1][same], mixed[1][same])


def test_nan_logits_stay_visible_in_the_logprob() -> None:
    tokens, logprobs = sample(torch.full((1, 7), math.nan), _rules([1.0]), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= tokens.item() < 7
    assert logprobs.isnan()
