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


def _unshared(request_of, count: int, seed: int, longest: int):
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 3, 5, 9, 16, 17, 18, 33, 34, 50, longest)) for _ in range(count)]
    return [
        request_of([rng.randrange(29) for _ in range(length)], seed=index, max_tokens=rng.choice((1, 3, 6)))
        for index, length in enumerate(lengths)
    ]


def _bits(generation):
    return generation.token_ids, generation.logprobs, generation.finish_reason


@pytest.mark.parametrize(
    ("name", "slots", "context", "dtype", "threads"),
    [
        ("llama", 5, 96, torch.float32, 1),
        ("llama_biases", 7, 130, torch.float32, 1),
        ("llama", 10, 96, torch.float32, 2),
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
    ("name", "slots", "changes", "dtype", "threads"),
    [
        ("llama", 64, {}, torch.float32, 1),
        ("llama_biases", 40, {}, torch.float32, 2),
        ("qwen3", 9, {}, torch.float32, 1),
        ("qwen3", 64, {}, torch.bfloat16, 1),
        ("llama_one_layer", 17, {}, torch.float32, 1),
        pytest.param(
            *("mistral", 100, {"hidden_size": 128, "head_dim": 32, "intermediate_size": 1000}, torch.float32, 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_different_prompts_that_start_together_do_not_touch_each_other(
    name, slots, changes, dtype, threads, policy, build, drive, request_of
) -> None:
    torch.set_num_threads(threads)
    model = policy(name, **changes)
    requests = _unshared(request_of, 90, seed=slots, longest=90)
    make = {"slots": slots, "context": 96, "dtype": dtype, "threads": threads}
    reference = drive(build(model, **make), requests)
    for trial in range(3):
        rng = random.Random(trial)
        order = rng.sample(range(90), 90)
        # All at once, then a few at a time, then mostly alone.
        arrivals = [rng.randrange((1, 15, 100)[trial]) for _ in order]
        again = drive(build(model, **make), [requests[i] for i in order], arrivals)
        for i, generation in zip(order, again, strict=True):
            assert _bits(generation) == _bits(reference[i])
    scheduler = build(model, **make)
    for request, expected in zip(requests[::6], reference[::6], strict=True):
        (alone,) = drive(scheduler, [request])
        assert _bits(alone) == _bits(expected)


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "threads"),
    [
        ("llama", {}, torch.float32, 1),
        ("qwen3", {}, torch.bfloat16, 1),
        ("llama_biases", {"hidden_size": 128, "head_dim": 32, "intermediate_size": 320}, torch.float32, 1),
        ("llama", {"hidden_size": 128, "head_dim": 32, "intermediate_size": 1000}, torch.float32, 2),
    ],
)
@pytest.mark.parametrize("length", [2, 4, 13, 17, 24])
def test_every_row_of_a_prefill_gives_the_same_bits(name, changes, dtype, threads, length, policy, build) -> None:
    torch.set_num_threads(threads)
    decoder = build(policy(name, **changes), slots=64, context=96, dtype=dtype, threads=threads)._decoder
    rng = random.Random(length)
    prompt = tuple(rng.randrange(29) for _ in range(length))
    (pack,) = decoder.packer.pack([prompt])
    (expected,) = decoder.prefill(pack)
    rows = len(pack.token_ids)
    starts = set()
    for before in range(length, rows - length + 2):
        other = tuple(rng.randrange(29) for _ in range(before + 1))
        behind = [tuple(rng.randrange(29) for _ in range(2)) for _ in range(rng.randrange(3))]
        for pack in decoder.packer.pack([prompt, other, *behind]):
            for found, start, prefilled in zip(pack.prompts, pack.starts, decoder.prefill(pack), strict=True):
                if found == prompt:
                    starts.add(start)
                    assert torch.equal(prefilled, expected)
    # As far as the longest-first order lets it get.
    assert starts >= set(range(length, rows - length + 2))


def test_every_place_among_prompts_of_one_length_gives_the_same_bits(policy, build) -> None:
    decoder = build(policy("qwen2"), slots=64, context=96)._decoder
    prompt, others = (5, 9, 3, 7, 1, 2, 4), [(6, 9, 3, 7, 1, 2, last) for last in range(20)]
    (pack,) = decoder.packer.pack([prompt])
    (expected,) = decoder.prefill(pack)
    places = set()
    for place in range(21):
        for pack in decoder.packer.pack([*others[:place], prompt, *others[place:]]):
            if prompt in pack.prompts:
                places.add(pack.prompts.index(prompt))
                assert torch.equal(decoder.prefill(pack)[pack.prompts.index(prompt)], expected)
    assert places == set(range(8))


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
@pytest.mark.parametrize(
    ("width", "batches"), [(40, (5,)), (320, (128,)), (321, (7,)), (11008, (128, 64)), (1, (1,)), (1000, (33, 48))]
)
def test_every_thread_gets_whole_vectors(width, batches, threads) -> None:
    padded = aligned_width(width, batches, threads)
    assert padded >= width
    most = 1
    for rows in batches:
        total = rows * padded
        used = min(threads, -(-total // 32768))
        assert -(-total // used) % 64 == 0
        most *= used
    assert padded - width < 64 * (most + 1)
