import random

import pytest
import torch

from lightning_ppo.rollout.local.decoder_weights import aligned_width


def _requests(request_of, count: int, seed: int):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(29) for _ in range(rng.choice((1, 2, 3, 8, 16, 17, 18, 40)))) for _ in range(count)]
    return [
        request_of(
            rng.choice(prompts),
            seed=index,
            max_tokens=rng.choice((1, 4, 20, 60)),
            temperature=rng.choice((0.0, 0.6, 1.0, 1.0)),
            top_k=rng.choice((0, 0, 0, 5)),
            top_p=rng.choice((1.0, 1.0, 0.7)),
            stop_token_ids=rng.choice(((), (4,), (4, 5, 6))),
        )
        for index in range(count)
    ]


def _bits(generation):
    return generation.token_ids, generation.logprobs, generation.finish_reason


@pytest.mark.parametrize(
    ("name", "slots", "context", "dtype", "threads"),
    [
        ("llama", 5, 96, torch.float32, 1),
        ("llama_biases", 7, 130, torch.float32, 1),
        ("llama_gqa_tied", 16, 128, torch.float32, 2),
        ("llama_yarn", 3, 128, torch.float32, 1),
        ("qwen2", 1, 100, torch.float32, 1),
        ("qwen3", 33, 128, torch.float32, 1),
        ("qwen3", 6, 96, torch.bfloat16, 1),
        ("mistral", 13, 77, torch.float32, 1),
    ],
)
def test_a_request_gives_the_same_bits_whatever_else_runs(
    name, slots, context, dtype, threads, policy, build, drive, request_of
) -> None:
    torch.set_num_threads(threads)
    model = policy(name)
    requests = _requests(request_of, 40, seed=slots)
    reference = drive(build(model, slots, context, dtype=dtype, threads=threads), requests)
    assert len({len(g.token_ids) for g in reference}) > 3
    for trial in range(4):
        rng = random.Random(100 * slots + trial)
        order = rng.sample(range(40), 40)
        arrivals = [rng.randrange(80) if trial else 0 for _ in order]
        again = drive(
            build(model, slots, context, dtype=dtype, threads=threads), [requests[i] for i in order], arrivals
        )
        for i, generation in zip(order, again, strict=True):
            assert _bits(generation) == _bits(reference[i])


def test_alone_and_in_a_crowd(policy, build, drive, request_of) -> None:
    model = policy("qwen3")
    requests = _requests(request_of, 30, seed=1)
    crowd = drive(build(model, 9, 128), requests)
    for request, expected in zip(requests[::5], crowd[::5], strict=True):
        (alone,) = drive(build(model, 9, 128), [request])
        assert _bits(alone) == _bits(expected)


@pytest.mark.parametrize(
    ("slots", "inner", "threads"),
    # The last one is large enough for torch to share the activation among threads, in the middle of a row.
    [(128, 320, 1), (100, 320, 1), (128, 320, 2), (33, 1000, 2)],
)
def test_every_slot_gives_the_same_bits(slots, inner, threads, policy, build, drive, request_of) -> None:
    torch.set_num_threads(threads)
    model = policy(
        "llama", hidden_size=128, intermediate_size=inner, head_dim=32, vocab_size=42, initializer_range=0.05
    )
    requests = [request_of((5, 9, 3, 7), seed=3, max_tokens=48)] * slots
    found = drive(build(model, slots, 96, threads=threads), requests)
    assert len({_bits(generation) for generation in found}) == 1
    assert len(found[0].token_ids) == 48


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("width", "rows"), [(40, 5), (320, 128), (321, 7), (11008, 128), (1, 1)])
def test_every_thread_gets_whole_vectors(width, rows, threads) -> None:
    padded = aligned_width(width, rows, threads)
    total = rows * padded
    used = min(threads, -(-total // 32768))
    assert padded >= width
    assert padded - width < 64 * (used + 1)
    assert -(-total // used) % 64 == 0
