"""Requests and answers: against the real server, and against answers that no server should give."""

import asyncio
import json
import socket
import time
import urllib.request

import pytest
import torch

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import GenerationRequest, SamplingParams
from lightning_ppo.rollout.vllm import generation
from lightning_ppo.rollout.vllm.generation import GenerationClient, ServerFailedError, read_versions

REQUEST = GenerationRequest("draw3_g1", (5, 6, 7), SamplingParams(8, stop_token_ids=(1,)), 7)


@pytest.fixture
def reset(engine, make_policy):
    """The shared server with policy 0 as version 5."""
    engine.update_weights(make_policy(0).state_dict().items(), 5)
    return make_policy(0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_trainer(temperature, reset, url, make_requests, sample, score):
    requests = make_requests(16, 48, temperature=temperature)
    answers = sample(url, requests)
    errors = [
        (score(reset, r, a) - torch.tensor(a.logprobs)).abs().max() for r, a in zip(requests, answers, strict=True)
    ]
    assert max(errors) < 1e-4
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert {version for answer in answers for version in answer.policy_versions} == {5}


def test_filters_renormalise(reset, url, make_requests, sample):
    """top_k=2: the probabilities of the two best tokens add up to one."""
    (request,) = make_requests(1, 1, top_k=2, stop_token_ids=())
    pairs = {}
    for seed in range(30):
        asked = GenerationRequest(f"k{seed}", request.prompt_ids, request.sampling, seed)
        (answer,) = sample(url, [asked])
        pairs[answer.token_ids] = answer.logprobs[0]
    assert len(pairs) == 2
    assert sum(torch.tensor(list(pairs.values())).exp()) == pytest.approx(1.0, abs=1e-4)
    (best,) = make_requests(1, 1, top_p=1e-6, stop_token_ids=())
    assert sample(url, [best])[0].logprobs == pytest.approx((0.0,), abs=1e-5)


def test_only_our_stop_tokens_end_a_response(reset, url, make_requests, sample):
    """The policy's own end-of-sequence token, 1, is a token like any other unless it is among them."""
    stopped = [a for a in sample(url, make_requests(16, 48)) if a.finish_reason == "stop"]
    assert stopped
    assert all(answer.token_ids.index(1) == len(answer.token_ids) - 1 for answer in stopped)
    free = sample(url, make_requests(16, 48, stop_token_ids=()))
    assert all(answer.finish_reason == "length" and len(answer.token_ids) == 48 for answer in free)
    assert any(1 in answer.token_ids[:-1] for answer in free)


def test_the_seed_is_the_only_randomness(reset, url, make_requests, sample):
    requests = make_requests(4, 16, stop_token_ids=())
    together, alone = sample(url, requests), [sample(url, [request])[0] for request in requests]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    largest = [GenerationRequest("max", (5,), requests[0].sampling, 2**63 - 1)]
    assert sample(url, largest)[0].token_ids == sample(url, largest)[0].token_ids
    other = [GenerationRequest("other", (5,), requests[0].sampling, 2**63 - 2)]
    assert sample(url, largest)[0].token_ids != sample(url, other)[0].token_ids


def test_logprobs_are_float32(reset, url, make_requests, sample):
    (answer,) = sample(url, make_requests(1))
    assert torch.tensor(answer.logprobs, dtype=torch.float32).tolist() == list(answer.logprobs)


def running(url):
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_cancelling_aborts_on_the_server(reset, url, make_requests):
    async def cancel():
        client = GenerationClient(60.0)
        try:
            requests = make_requests(3, 350, stop_token_ids=())
            tasks = [asyncio.create_task(client.generate("s", url, r, f"cancel-{r.request_id}")) for r in requests]
            deadline = time.monotonic() + 20
            while await asyncio.to_thread(running, url) < 3:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            # 350 tokens take longer than this
            stop = time.monotonic()
            while await asyncio.to_thread(running, url) > 0:
                await asyncio.sleep(0.005)
            return time.monotonic() - stop
        finally:
            client.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(cancel(), 30))


def ask(url, request=REQUEST, timeout_s=5.0):
    async def run():
        client = GenerationClient(timeout_s)
        try:
            return await client.generate("s0", url, request, "attempt")
        finally:
            client.close()
            await asyncio.sleep(0)

    return asyncio.run(run())


def test_the_request_names_all_that_shapes_the_distribution(fake_server):
    fake = fake_server()
    fake.version = "3"
    answer = ask(fake.url)
    ((path, body),) = fake.calls
    assert path == "/inference/v1/generate"
    assert body == {
        "request_id": "attempt",
        "priority": 0,
        "token_ids": [5, 6, 7],
        "stream": False,
        "sampling_params": {
            "n": 1,
            "max_tokens": 8,
            "min_tokens": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": 7,
            "ignore_eos": True,
            "stop_token_ids": [1],
            "logprobs": 0,
            "detokenize": False,
        },
    }
    assert (answer.request_id, answer.token_ids, answer.logprobs) == ("draw3_g1", (5, 6, 1), (-0.5, -0.5, -0.5))
    assert (answer.finish_reason, answer.policy_versions) == ("stop", (3, 3, 3))


def logprobs(*tokens):
    return {"content": [{"token_id": token, "logprob": -1.0} for token in tokens]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "abort"}, "given up after 3 tokens"),
        ({"finish_reason": None}, "finish_reason=None"),
        ({"finish_reason": "error"}, "finish_reason=error"),
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": None}, "0 tokens"),
        ({"logprobs": None}, "log-probs of 0"),
        ({"logprobs": logprobs(5, 6)}, "log-probs of 2"),
        ({"logprobs": logprobs(5, 6, 2)}, "log-probs of 3 others"),
        ({"logprobs": {"content": [{"token_id": 5}]}}, "cannot be read"),
    ],
)
def test_half_an_answer_is_a_failure_of_the_server(fake_server, changes, reason):
    fake = fake_server()
    fake.version = "3"
    fake.answers["/inference/v1/generate"] = (200, fake.response([5, 6, 1], **changes))
    with pytest.raises(ServerFailedError, match=reason) as caught:
        ask(fake.url)
    assert "server s0, request draw3_g1" in str(caught.value)
    assert isinstance(caught.value, EngineDiedError)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [{"version": "3", "start": 0, "end": 2}],
        [{"version": "3", "start": 0, "end": 4}],
        [{"version": "3", "start": 1, "end": 3}],
        [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 1, "end": 3}],
        [{"version": "default", "start": 0, "end": 3}],
        [{"version": "3"}],
    ],
)
def test_tokens_without_a_version_are_an_error_of_every_server(fake_server, spans):
    fake = fake_server()
    fake.answers["/inference/v1/generate"] = (200, fake.response([5, 6, 1], weight_versions=spans))
    with pytest.raises(EngineError, match="weight versions") as caught:
        ask(fake.url)
    assert not isinstance(caught.value, ServerFailedError)


def test_versions_of_spans():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    assert read_versions(spans, 3, "s") == (3, 3, 5)


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ((400, {"error": {"message": "too\nlong"}}), EngineError, "refused with 400: too long"),
        ((404, {"detail": "Not Found"}), EngineError, "refused with 404: Not Found"),
        ((500, {"error": {"message": "EngineCore encountered an issue"}}), ServerFailedError, "500: EngineCore"),
        ((503, b""), ServerFailedError, "answered 503: no reason given"),
        ((200, b"data: [DONE]"), ServerFailedError, "cannot be read"),
        ((200, b'{"choices": []}'), ServerFailedError, "cannot be read"),
        ((200, json.dumps(["a"]).encode()), ServerFailedError, "cannot be read"),
        (lambda body: None, ServerFailedError, "connection lost"),
    ],
)
def test_failures_of_http(fake_server, answer, kind, reason):
    fake = fake_server()
    fake.answers["/inference/v1/generate"] = answer
    with pytest.raises(EngineError, match=reason) as caught:
        ask(fake.url)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_and_one_that_is_not_there(fake_server):
    fake = fake_server()
    fake.answers["/inference/v1/generate"] = fake.hang
    with pytest.raises(ServerFailedError, match=r"no answer within request_timeout_s=0.2"):
        ask(fake.url, timeout_s=0.2)
    fake.close()
    with pytest.raises(ServerFailedError, match="connection lost"):
        ask(fake.url)


def test_a_host_that_takes_no_connection_is_not_blamed_on_the_request(monkeypatch):
    monkeypatch.setattr(generation, "_CONNECT_S", 0.3)
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    try:
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(ServerFailedError, match=rf"{url} did not take a connection within 0.3 s") as caught:
            ask(url, timeout_s=None)
        assert "request_timeout_s" not in str(caught.value)
        # the deadline of the request stays one, also while it connects
        with pytest.raises(ServerFailedError, match=r"no answer within request_timeout_s=0.1"):
            ask(url, timeout_s=0.1)
    finally:
        for each in (full, *waiting):
            each.close()


def test_a_connection_that_breaks_in_mid_answer(fake_server):
    fake = fake_server()
    fake.answers["/inference/v1/generate"] = (200, fake.cut(json.dumps(fake.response([5, 6, 1])).encode()))
    with pytest.raises(ServerFailedError, match="connection lost"):
        ask(fake.url)
