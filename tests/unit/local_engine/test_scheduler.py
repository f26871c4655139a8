import pytest
import torch

from lightning_ppo.rollout.local.protocol import Submit


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_limits_and_stop_tokens(backend, policy, build, drive, request_of) -> None:
    scheduler = build(policy("llama"), context=16, backend=backend)
    everything = tuple(range(29))
    stopped, limited, full, last = drive(
        scheduler,
        [
            request_of((1, 2, 3), stop_token_ids=everything),
            request_of((1, 2, 3), max_tokens=5),
            request_of((1, 2, 3), max_tokens=99),
            request_of(range(15), max_tokens=99),
        ],
    )
    assert (len(stopped.token_ids), stopped.finish_reason) == (1, "stop")
    assert (len(limited.token_ids), limited.finish_reason) == (5, "length")
    assert (len(full.token_ids), full.finish_reason) == (13, "length")
    assert (len(last.token_ids), last.finish_reason) == (1, "length")


def test_a_stop_token_at_the_limit_counts_as_stop(policy, build, drive, request_of) -> None:
    request = request_of((1, 2), max_tokens=3, stop_token_ids=())
    (free,) = drive(build(policy("llama")), [request])
    stop = free.token_ids[-1]
    if stop in free.token_ids[:-1]:
        pytest.fail("pick another seed: the third token must be new")
    (again,) = drive(build(policy("llama")), [request_of((1, 2), max_tokens=3, stop_token_ids=(stop,))])
    assert again.token_ids == free.token_ids
    assert again.finish_reason == "stop"


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_new_weights_in_flight_switch_the_version_of_later_tokens_only(
    backend, policy, build, request_of, reference_logprobs
) -> None:
    old, new = policy("llama", seed=0), policy("llama", seed=1)
    scheduler = build(old, backend=backend)
    scheduler.submit(Submit(0, request_of((5, 9, 3), max_tokens=8)))
    finished = None
    for step in range(8):
        if step == 3:
            scheduler.load(dict(new.state_dict()))
        finished = scheduler.step(0 if step < 3 else 1)
    assert finished is not None
    assert finished.versions.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    tokens = finished.token_ids.tolist()
    expected = reference_logprobs(old, (5, 9, 3), tokens)[torch.arange(3), torch.tensor(tokens[:3])]
    assert (expected - torch.tensor(finished.logprobs[:3])).abs().max() < 1e-5
    # Later tokens come from the new weights on the old keys and values: neither policy alone explains them.
    for model in (old, new):
        alone = reference_logprobs(model, (5, 9, 3), tokens)[torch.arange(3, 8), torch.tensor(tokens[3:])]
        assert (alone - torch.tensor(finished.logprobs[3:])).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_aborted_requests_leave_at_once_wherever_they_are(backend, policy, build, drive, request_of) -> None:
    scheduler = build(policy("llama"), slots=2, backend=backend)
    for key in range(4):
        scheduler.submit(Submit(key, request_of((1, 2), seed=key)))
    scheduler.step(0)
    for key in (0, 3, 99):
        scheduler.abort(key)
    keys = []
    for _ in range(60):
        finished = scheduler.step(0)
        keys += finished.keys if finished else []
    assert sorted(keys) == [1, 2]
    assert not scheduler.is_busy
    scheduler.abort(1)
    assert len(drive(scheduler, [request_of((1, 2))])[0].token_ids) == 12


def test_a_group_shares_one_prefill_even_when_it_starts_in_pieces(
    policy, build, drive, request_of, monkeypatch
) -> None:
    scheduler = build(policy("llama"), slots=3)
    calls = []
    original = scheduler._decoder.prefill
    monkeypatch.setattr(scheduler._decoder, "prefill", lambda pack: calls.append(pack.prompts) or original(pack))
    drive(scheduler, [request_of((1, 2, 3), seed=seed) for seed in range(8)] + [request_of((4, 5), seed=9)])
    assert calls == [((1, 2, 3),), ((4, 5),)]
    scheduler.load(dict(policy("llama", seed=1).state_dict()))
    drive(scheduler, [request_of((1, 2, 3))])
    assert len(calls) == 3


def test_prompts_that_start_together_share_a_prefill_and_the_last_ones_are_kept(
    policy, build, drive, request_of, monkeypatch
) -> None:
    scheduler = build(policy("llama"), slots=64)
    calls = []
    original = scheduler._decoder.prefill
    monkeypatch.setattr(scheduler._decoder, "prefill", lambda pack: calls.append(pack.prompts) or original(pack))
    # Packs take the longest prompts first; the last to arrive are among the shortest, and must be kept all the same.
    prompts = [(1, *[2] * length) for length in (20, 18, 9, 8, 7, 6, 5)] + [(i, i) for i in range(3, 8)]
    drive(scheduler, [request_of(prompt, seed=seed) for seed, prompt in enumerate(prompts * 2)])
    assert sorted(prompt for call in calls for prompt in call) == sorted(prompts)
    assert len(calls) < 4
    calls.clear()
    drive(scheduler, [request_of(prompt) for prompt in prompts[-8:]])
    assert calls == []
    drive(scheduler, [request_of(prompts[3])])
    assert calls == [(prompts[3],)]


def test_slots_are_refilled_in_the_step_after_they_fall_free(policy, build, request_of) -> None:
    scheduler = build(policy("llama"), slots=2)
    lengths = [1, 5, 3, 2, 1]
    for key, length in enumerate(lengths):
        scheduler.submit(Submit(key, request_of((1, 2), seed=key, max_tokens=length)))
    steps = 0
    while scheduler.is_busy:
        scheduler.step(0)
        steps += 1
    # 12 tokens over 2 slots: 1+3+2 in one, 5+1 in the other.
    assert steps == 6
