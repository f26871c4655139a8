import json

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, MistralConfig, Qwen3Config

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.local.protocol import Submit
from lightning_ppo.rollout.local.skeleton import Skeleton

_NATIVE = [
    *("llama", "llama_gqa_tied", "llama_biases", "llama_head_dim", "llama_yarn", "llama_llama3", "llama_one_layer"),
    *("mistral", "qwen2", "qwen3", "qwen3_tied"),
]
_OTHERS = ["gpt2", "gpt_neox"]
_ALL = [(name, "native") for name in _NATIVE] + [(name, "transformers") for name in [*_OTHERS, "llama_gqa_tied"]]
_PROMPTS = [(5, 9, 3), (1,), tuple(range(20)), (7, 7), (2, 28, 0, 11, 13)]


@pytest.mark.parametrize(("name", "backend"), _ALL)
def test_greedy_equals_transformers_generate(name, backend, policy, build, drive, request_of) -> None:
    model = policy(name)
    scheduler = build(model, slots=3, backend=backend)
    found = drive(scheduler, [request_of(p, max_tokens=15, temperature=0.0, stop_token_ids=(4,)) for p in _PROMPTS])
    settings = GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=4, pad_token_id=0)
    for prompt, generation in zip(_PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert list(generation.token_ids) == expected[0, len(prompt) :].tolist()
        assert generation.finish_reason == ("stop" if generation.token_ids[-1] == 4 else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("name", "backend"), _ALL)
def test_logprobs_equal_a_full_forward(
    name, backend, temperature, policy, build, drive, request_of, reference_logprobs
) -> None:
    model = policy(name)
    requests = [
        request_of(prompt, seed=seed, max_tokens=30, temperature=temperature, stop_token_ids=(4, 6))
        for seed, prompt in enumerate(_PROMPTS * 2)
    ]
    for request, generation in zip(requests, drive(build(model, backend=backend), requests), strict=True):
        tokens = torch.tensor(generation.token_ids)
        expected = reference_logprobs(model, request.prompt_ids, generation.token_ids, temperature)
        chosen = expected.gather(1, tokens[:, None]).squeeze(1)
        assert (chosen - torch.tensor(generation.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 12, "top_p": 0.8, "temperature": 0.7}])
def test_filtered_logprobs_equal_a_renormalised_full_forward(
    sampling, policy, build, drive, request_of, reference_logprobs
) -> None:
    model = policy("qwen3")
    requests = [request_of(prompt, seed=seed, **sampling) for seed, prompt in enumerate(_PROMPTS)]
    for request, generation in zip(requests, drive(build(model), requests), strict=True):
        full = reference_logprobs(model, request.prompt_ids, generation.token_ids, sampling.get("temperature", 1.0))
        for row, token, logprob in zip(full.double().exp(), generation.token_ids, generation.logprobs, strict=True):
            ranked = sorted(range(29), key=lambda i: -row[i].item())[: sampling.get("top_k", 29)]
            total, mass, kept = sum(row[i].item() for i in ranked), 0.0, []
            for i in ranked:
                kept.append(i)
                mass += row[i].item() / total
                if mass >= sampling.get("top_p", 1.0):
                    break
            assert token in kept
            assert abs((row[token] / row[kept].sum()).log().item() - logprob) < 1e-5


def test_sampled_frequencies_follow_the_model(policy, build, drive, request_of, reference_logprobs) -> None:
    model = policy("llama")
    count = 4000
    requests = [request_of((5, 9, 3), seed=seed, max_tokens=1) for seed in range(count)]
    tokens = torch.tensor([g.token_ids[0] for g in drive(build(model, slots=64), requests)])
    expected = reference_logprobs(model, (5, 9, 3), (0,)).exp()[0] * count
    seen = torch.bincount(tokens, minlength=29)
    big = expected > 5
    chi_square = ((seen - expected)[big].square() / expected[big]).sum()
    freedom = int(big.sum())
    # Five standard deviations of the chi-square distribution; the seeds are fixed, so this cannot flake.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_bfloat16_is_close_to_float32(policy, build, drive, request_of, reference_logprobs) -> None:
    model = policy("qwen3")
    request = request_of((5, 9, 3), max_tokens=8)
    (generation,) = drive(build(model, dtype=torch.bfloat16), [request])
    expected = reference_logprobs(model, request.prompt_ids, generation.token_ids)
    chosen = expected.gather(1, torch.tensor(generation.token_ids)[:, None]).squeeze(1)
    gap = (chosen - torch.tensor(generation.logprobs)).abs().max()
    assert 0 < gap < 0.5


@pytest.mark.parametrize(
    ("config", "context", "reason"),
    [
        (
            Qwen3Config(num_hidden_layers=2, use_sliding_window=True, max_window_layers=1, sliding_window=8),
            64,
            "sliding",
        ),
        (MistralConfig(num_hidden_layers=1, sliding_window=32), 33, "sliding"),
        (MistralConfig(num_hidden_layers=1, sliding_window=32), 32, None),
        (
            LlamaConfig(
                num_hidden_layers=1,
                max_position_embeddings=32,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            33,
            "rotary",
        ),
        (
            LlamaConfig(
                num_hidden_layers=1,
                max_position_embeddings=32,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            32,
            None,
        ),
    ],
)
def test_native_support_is_decided_strictly(config, context, reason) -> None:
    problem = Skeleton.of(config.to_json_string(use_diff=False)).native_problem(context)
    assert (problem is None) if reason is None else (problem is not None and reason in problem)


@pytest.mark.parametrize("name", _OTHERS)
def test_other_architectures_are_left_to_the_fallback(name, policy) -> None:
    problem = Skeleton.of(policy(name).config.to_json_string(use_diff=False)).native_problem(64)
    assert problem is not None


@pytest.mark.parametrize("model_type", ["nonsense", "clip_vision_model", None])
def test_configs_without_a_causal_language_model_are_refused(model_type) -> None:
    with pytest.raises(EngineError, match=f"model_type={model_type}"):
        Skeleton.of(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(("tied_name"), ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_name_of_tied_weights_is_enough(tied_name, policy) -> None:
    model = policy("llama_gqa_tied")
    skeleton = Skeleton.of(model.config.to_json_string(use_diff=False))
    weights = {n: t for n, t in model.state_dict().items() if n not in ("model.embed_tokens.weight", "lm_head.weight")}
    weights[tied_name] = model.lm_head.weight
    assert torch.equal(skeleton.canonical(weights)["model.embed_tokens.weight"], model.lm_head.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"extra": torch.ones(1)}), "extra is not a tensor of the llama policy"),
        (lambda w: w.update({"lm_head.weight": torch.ones(28, 24)}), r"lm_head.weight has shape \[28, 24\]"),
    ],
)
def test_weights_of_another_policy_are_refused(change, message, policy) -> None:
    model = policy("llama")
    weights = dict(model.state_dict())
    change(weights)
    with pytest.raises(EngineError, match=message):
        Skeleton.of(model.config.to_json_string(use_diff=False)).canonical(weights)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_logits_that_are_not_finite_are_an_error(backend, policy, build, request_of) -> None:
    model = policy("llama")
    model.model.norm.weight.fill_(float("nan"))
    scheduler = build(model, backend=backend)
    scheduler.submit(Submit(0, request_of((1, 2))))
    with pytest.raises(FloatingPointError, match="policy version 7"):
        scheduler.step(7)
