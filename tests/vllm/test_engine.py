"""The whole engine: one real server, and fleets of pretended ones that fail."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from processes import wait_for

from lightning_ppo.errors import ConfigError, EngineDiedError, EngineError
from lightning_ppo.rollout.engine import GenerationRequest, SamplingParams
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.control import Control, SilentError
from lightning_ppo.rollout.vllm.engine import VLLMEngine
from lightning_ppo.rollout.vllm.member import MemberState
from lightning_ppo.rollout.vllm.open_files import OpenFilesError

WEIGHTS = [("a.weight", torch.ones(3)), ("b.weight", torch.zeros(2, 2))]
REQUEST = GenerationRequest("draw3_g1", (5, 6, 7), SamplingParams(8, stop_token_ids=(1,)), 7)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture
def start_fakes(fake_server, make_spec, transfer_folder):
    """An engine on pretended servers: `start_fakes(2, **settings)` gives the engine and the servers."""
    engines = []

    def start(count=2, *, can_sleep=False, **settings):
        fakes = [fake_server() for _ in range(count)]
        defaults = {
            "transport": "file",
            "transfer_folder": str(transfer_folder),
            "update_timeout_s": 5.0,
            "start_timeout_s": 5.0,
            "probe_interval_s": 0.1,
            "probe_timeout_s": 1.0,
        }
        config = VLLMConfig(urls=tuple(f.url for f in fakes), **{**defaults, **settings})
        engine = VLLMEngine(config, can_sleep=can_sleep)
        engines.append(engine)
        engine.start(make_spec())
        for fake in fakes:
            fake.calls.clear()
        return engine, fakes

    yield start
    for engine in engines:
        engine.close()


REFIT = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def test_servers_that_want_an_api_key(fake_server, make_spec, transfer_folder, monkeypatch):
    fake = fake_server()
    fake.key = "right"
    settings = {"transport": "file", "transfer_folder": str(transfer_folder), "start_timeout_s": 5.0}
    for key in (None, "wrong"):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("VLLM_API_KEY", key)
        engine = VLLMEngine(VLLMConfig(urls=(fake.url,), **settings))
        with pytest.raises(EngineError, match="wants another API key; set VLLM_API_KEY in the trainer's environment"):
            engine.start(make_spec())
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    # what stands in the settings of our servers goes before
    for config in (
        VLLMConfig(urls=(fake.url,), **settings, environment={"VLLM_API_KEY": "right"}),
        VLLMConfig(urls=(fake.url,), **settings),
    ):
        engine = VLLMEngine(config)
        engine.start(make_spec())
        engine.update_weights(WEIGHTS, 1)
        assert run(engine.generate(REQUEST)).policy_versions[0] == 1
        engine.close()
        monkeypatch.setenv("VLLM_API_KEY", "right")


def test_update_is_the_same_steps_on_all_servers(start_fakes):
    engine, fakes = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    assert [fake.paths() for fake in fakes] == [REFIT, REFIT]
    assert [fake.version for fake in fakes] == ["1", "1"]
    assert [member.version for member in engine.fleet.serving()] == [1, 1]
    answers = run(engine.probe(REQUEST))
    assert {name: set(answer.policy_versions) for name, answer in answers.items()} == {f.url: {1} for f in fakes}


def test_no_server_goes_on_before_all_have_loaded(start_fakes):
    engine, (fast, slow) = start_fakes(2)
    order = []
    fast.answers["/resume"] = lambda body: order.append("fast goes on") or (200, {})

    def finish(body):
        time.sleep(0.3)
        order.append("slow has loaded")
        return slow.serve(body["weight_version"])

    slow.answers["/finish_weight_update"] = finish
    engine.update_weights(WEIGHTS, 1)
    assert order == ["slow has loaded", "fast goes on"]


def test_in_warmup_only_the_number_is_sent(start_fakes):
    engine, fakes = start_fakes(2)
    with pytest.raises(EngineError, match="send the whole state dict once"):
        engine.update_weights((), 1)
    engine.update_weights(WEIGHTS, 1)
    for fake in fakes:
        fake.calls.clear()
    engine.update_weights((), 2)
    assert [fake.calls[-1] for fake in fakes] == [("/update_weight_version", {"new_version": "2"})] * 2
    assert [fake.paths() for fake in fakes] == [["/update_weight_version"]] * 2
    assert set(run(engine.generate(REQUEST)).policy_versions) == {2}


def test_a_slash_at_the_end_of_an_address_does_not_become_two(fake_server, make_spec, transfer_folder):
    """vLLM does not know `//inference/v1/generate`, and neither does the pretended server."""
    fake = fake_server()
    settings = {"transport": "file", "transfer_folder": str(transfer_folder), "start_timeout_s": 5.0}
    engine = VLLMEngine(VLLMConfig(urls=(f"{fake.url}/",), **settings))
    try:
        engine.start(make_spec())
        engine.update_weights(WEIGHTS, 1)
        assert run(engine.generate(REQUEST)).token_ids == (5, 6, 1)
        assert list(run(engine.probe(REQUEST))) == [fake.url]
    finally:
        engine.close()


def test_a_server_that_fails_a_refit_gets_the_weights_before_it_serves_again(start_fakes, caplog):
    engine, (good, bad) = start_fakes(2, trust_after=1)
    engine.update_weights(WEIGHTS, 1)
    bad.answers["/update_weights"] = lambda body: (500, {"error": {"message": "no room"}})
    engine.update_weights(WEIGHTS, 2)
    assert "does not serve policy version 2" in caplog.text
    assert "no room" in caplog.text
    assert [member.url for member in engine.fleet.serving()] == [good.url]
    assert set(run(engine.probe(REQUEST))) == {good.url}
    # half an update is no policy: it was not let go on
    assert bad.paths().count("/resume") == 1
    bad.answers["/update_weights"] = (200, {})
    deadline = time.monotonic() + 10
    while len(engine.fleet.serving()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert bad.version == "2"
    assert [path for path in bad.paths() if path in REFIT][-5:] == REFIT
    assert set(run(engine.probe(REQUEST))) == {good.url, bad.url}


def test_if_no_server_takes_the_weights_each_is_named(start_fakes):
    engine, fakes = start_fakes(2)
    for number, fake in enumerate(fakes):
        fake.answers["/update_weights"] = (500, {"error": {"message": f"reason {number}"}})
    with pytest.raises(EngineError, match="no vLLM server serves policy version 1") as caught:
        engine.update_weights(WEIGHTS, 1)
    for number, fake in enumerate(fakes):
        assert f"{fake.url} answered POST /update_weights with 500: reason {number}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refit_that_takes_too_long_is_an_error(start_fakes):
    engine, (fake,) = start_fakes(1, update_timeout_s=0.5)
    fake.answers["/update_weights"] = fake.hang
    with pytest.raises(EngineError, match=r"did not answer POST /update_weights in time"):
        engine.update_weights(WEIGHTS, 1)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (WEIGHTS[:1], "b.weight is missing"),
        ([*WEIGHTS, ("c.weight", torch.ones(1))], "c.weight was not among the first weights"),
        ([*WEIGHTS, WEIGHTS[0]], "a.weight comes twice"),
        ([WEIGHTS[0], ("b.weight", torch.zeros(4))], r"b.weight is torch.float32\[4\] but was torch.float32\[2, 2\]"),
        ([WEIGHTS[0], ("b.weight", torch.zeros(2, 2).int())], "b.weight is torch.int32"),
    ],
)
def test_later_updates_carry_the_same_tensors(weights, reason, start_fakes):
    engine, (fake,) = start_fakes(1)
    engine.update_weights(WEIGHTS, 1)
    fake.calls.clear()
    with pytest.raises(EngineError, match=reason):
        engine.update_weights(weights, 2)
    # found before anything was held: the old weights go on being served
    assert fake.paths() == []
    assert set(run(engine.generate(REQUEST)).policy_versions) == {1}
    engine.update_weights(WEIGHTS, 2)
    assert fake.version == "2"


def test_requests_go_where_least_is_outstanding(start_fakes):
    engine, fakes = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    running, most, lock = [0, 0], [0, 0], threading.Lock()

    def answer(index):
        def generate(body):
            with lock:
                running[index] += 1
                most[index] = max(most[index], running[index])
            time.sleep(0.2)
            with lock:
                running[index] -= 1
            return 200, fakes[index].response([5, 6, 1])

        return generate

    for index, fake in enumerate(fakes):
        fake.answers["/inference/v1/generate"] = answer(index)

    async def all_at_once():
        return await asyncio.gather(*(engine.generate(REQUEST) for _ in range(8)))

    assert len(run(all_at_once())) == 8
    assert most == [4, 4]


@pytest.mark.parametrize(
    "failure",
    [
        lambda fake: (500, {"error": {"message": "EngineCore encountered an issue"}}),
        lambda fake: (200, fake.response([5, 6, 1], finish_reason="abort")),
        lambda fake: (200, fake.response([5, 6, 1], finish_reason=None)),
        lambda fake: None,
    ],
)
def test_a_request_that_a_server_fails_is_sent_to_another(failure, start_fakes):
    engine, (bad, good) = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    bad.answers["/inference/v1/generate"] = lambda body: failure(bad)
    answer = run(engine.generate(REQUEST))
    assert answer.token_ids == (5, 6, 1)
    assert answer.request_id == "draw3_g1"
    first, second = (
        next(body for path, body in fake.calls if path == "/inference/v1/generate") for fake in (bad, good)
    )
    assert first["sampling_params"] == second["sampling_params"]
    assert first["sampling_params"]["seed"] == 7
    assert first["request_id"] != second["request_id"]


def test_a_request_to_a_server_that_is_found_dead_is_sent_to_another(start_fakes):
    """Its connection is open and stays silent, as that of a host without power does."""
    engine, fakes = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    lost = engine.fleet.serving()[0]
    (fake,) = (fake for fake in fakes if fake.url == lost.url)
    fake.answers["/inference/v1/generate"] = fake.hang

    async def ask():
        jobs = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(2)]
        while "/inference/v1/generate" not in fake.paths():
            await asyncio.sleep(0.01)
        engine.fleet._roster.move(lost, MemberState.DEAD, "its host lost power")
        return await asyncio.gather(*jobs)

    assert [set(answer.policy_versions) for answer in run(ask())] == [{1}, {1}]
    assert lost.outstanding == 0


def test_a_request_that_is_refused_is_not_sent_again(start_fakes):
    engine, fakes = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    for fake in fakes:
        fake.calls.clear()
        fake.answers["/inference/v1/generate"] = (400, {"error": {"message": "too long"}})
    with pytest.raises(EngineError, match="request draw3_g1: refused with 400: too long"):
        run(engine.generate(REQUEST))
    assert sum(fake.paths().count("/inference/v1/generate") for fake in fakes) == 1
    assert [member.outstanding for member in engine.fleet.members()] == [0, 0]


def test_a_request_that_every_server_fails_ends(start_fakes):
    engine, (fake,) = start_fakes(1, quarantine_after=1000)
    engine.update_weights(WEIGHTS, 1)
    fake.answers["/inference/v1/generate"] = (500, {"error": {"message": "boom"}})
    with pytest.raises(EngineError, match=r"request draw3_g1 failed on 5 servers in turn; the last: .*boom"):
        run(engine.generate(REQUEST))


def test_a_process_that_may_open_no_more_files_keeps_its_servers(start_fakes, open_files, caplog):
    engine, (fake,) = start_fakes(1, quarantine_after=2, probe_interval_s=0.05)
    engine.update_weights(WEIGHTS, 1)

    async def ask():
        with open_files():
            with pytest.raises(OpenFilesError, match="request draw3_g1: open files="):
                await engine.generate(REQUEST)
            while caplog.text.count("cannot be probed") < 4:
                await asyncio.sleep(0.01)
        assert [member.url for member in engine.fleet.serving()] == [fake.url]
        return await engine.generate(REQUEST)

    assert run(ask()).token_ids == (5, 6, 1)
    assert engine.fleet.members()[0].failed_requests == 0


def test_a_probe_leaves_out_a_server_that_dies(start_fakes):
    engine, (bad, good) = start_fakes(2)
    engine.update_weights(WEIGHTS, 1)
    bad.close()
    assert list(run(engine.probe(REQUEST))) == [good.url]


def test_cancelling_frees_the_place(start_fakes):
    engine, (fake,) = start_fakes(1)
    engine.update_weights(WEIGHTS, 1)
    fake.answers["/inference/v1/generate"] = fake.hang

    async def cancel():
        task = asyncio.create_task(engine.generate(REQUEST))
        while engine.fleet.members()[0].outstanding == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())
    assert engine.fleet.members()[0].outstanding == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": ()}, "prompt_ids"),
        ({"prompt_ids": (90,)}, "outside the vocabulary"),
        ({"prompt_ids": (5,) * 384}, "leave no room"),
        ({"seed": -1}, "seed=-1"),
        ({"sampling": SamplingParams(8, temperature=0.001)}, "temperature=0.001 is raised to 0.01 by vLLM"),
        ({"sampling": SamplingParams(0)}, "max_tokens=0"),
    ],
)
def test_requests_out_of_range_never_leave(changes, reason, start_fakes):
    engine, (fake,) = start_fakes(1)
    engine.update_weights(WEIGHTS, 1)
    fake.calls.clear()
    request = GenerationRequest(**{**REQUEST.__dict__, **changes})
    with pytest.raises(EngineError, match=reason):
        run(engine.generate(request))
    assert fake.paths() == []


class Ours:
    """A pretended server as the process that a launcher has started."""

    def __init__(self, name, fake):
        self.name, self.url, self.fake = name, fake.url, fake

    def is_alive(self):
        return not self.fake.closing.is_set()

    def port_taken(self):
        return False

    def describe_end(self):
        return "was ended"

    def stop(self, *, kill=False):
        self.fake.close()

    close = stop


@pytest.fixture
def start_ours(fake_server, make_spec, transfer_folder):
    """An engine whose pretended servers are started, and started again, by it, with weights already.

    `start_ours(2)` gives the engine and all servers so far; `prepare(fake)` is called for every later one.
    """
    engines = []

    def start(count=1, prepare=lambda fake: None, **settings):
        fakes = []

        class Launcher:
            def launch(self, index):
                fake = fake_server()
                if len(fakes) >= count:
                    prepare(fake)
                fakes.append(fake)
                return Ours(f"server_{index}", fake)

            def close(self):
                for fake in fakes:
                    fake.close()

        times = {"update_timeout_s": 1.0, "start_timeout_s": 5.0, "probe_interval_s": 0.1, "probe_timeout_s": 1.0}
        config = VLLMConfig(
            device="cpu", transport="file", transfer_folder=str(transfer_folder), num_servers=count, **times, **settings
        )
        engine = VLLMEngine(config, make_launcher=lambda command: Launcher())
        engines.append(engine)
        engine.start(make_spec())
        engine.update_weights(WEIGHTS, 1)
        return engine, fakes

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/finish_weight_update", "/resume"])
@pytest.mark.parametrize("count", [1, 2])
def test_servers_that_all_hang_in_a_refit_are_restarted(count, path, start_ours):
    """As if they had died: an engine core that is stopped still answers the probes of its health."""
    engine, fakes = start_ours(count, max_restarts=count)
    for fake in fakes:
        fake.answers[path] = fake.hang
    engine.update_weights(WEIGHTS, 2)
    answers = run(engine.probe(REQUEST))
    assert set(answers) <= {f"server_{index}" for index in range(count)}
    assert all(set(answer.policy_versions) == {2} for answer in answers.values())
    assert 1 <= engine.restarts <= count


def test_servers_that_hang_whenever_they_are_sent_weights_use_their_restarts_up(start_ours):
    def prepare(fake):
        fake.answers["/update_weights"] = fake.hang

    engine, (fake,) = start_ours(prepare=prepare, max_restarts=1)
    prepare(fake)
    engine.update_weights(WEIGHTS, 2)
    with pytest.raises(
        EngineDiedError, match=r"max_restarts=1 used up: .* did not answer POST /update_weights in time"
    ):
        run(engine.probe(REQUEST))


def test_the_first_refit_of_a_server_of_ours_that_takes_too_long_is_an_error(start_ours, monkeypatch):
    """The limit is too short then: restarts would only hide it."""

    def hang(*_):
        raise SilentError("did not answer in time")

    monkeypatch.setattr(Control, "finish_update", hang)
    with pytest.raises(EngineError, match=r"no vLLM server serves policy version 1: did not answer in time"):
        start_ours()


def test_a_number_that_nobody_took_is_not_that_of_a_replacement(start_ours):
    engine, (fake, *_) = start_ours()
    fake.answers["/update_weight_version"] = (500, {"error": {"message": "no"}})
    with pytest.raises(EngineError, match="no vLLM server serves policy version 2"):
        engine.update_weights((), 2)
    assert engine.fleet.version == 1
    assert set(run(engine.generate(REQUEST)).policy_versions) == {1}
    assert engine.restarts == 1


def test_weights_that_nobody_took_are_not_given_to_a_replacement(start_ours):
    engine, (fake, *_) = start_ours(max_restarts=1)
    fake.answers["/update_weights"] = (500, {"error": {"message": "no"}})
    with pytest.raises(EngineError, match="no vLLM server serves policy version 2"):
        engine.update_weights(WEIGHTS, 2)
    with pytest.raises(EngineDiedError, match="cannot get weights: the last update was not completed"):
        run(engine.generate(REQUEST))


def test_an_update_that_breaks_off_is_called_by_its_version(start_ours, caplog):
    engine, _ = start_ours(bucket_bytes=1, max_restarts=10)

    def breaks_off():
        yield from WEIGHTS
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.update_weights(breaks_off(), 2)
    assert engine.fleet.version == 1
    assert "is quarantined: the update to policy version 2 broke off" in caplog.text
    assert "policy version 1" not in caplog.text
    engine.update_weights(WEIGHTS, 3)
    assert set(run(engine.generate(REQUEST)).policy_versions) == {3}


def test_servers_that_hang_when_they_should_sleep_or_wake_are_restarted(start_ours):
    engine, (fake,) = start_ours()
    fake.answers["/pause"] = fake.hang
    engine.sleep()
    engine.wake()
    engine.update_weights(WEIGHTS, 2)
    assert set(run(engine.generate(REQUEST)).policy_versions) == {2}
    (member,) = engine.fleet.serving()
    member.control.resume = lambda timeout_s: (_ for _ in ()).throw(SilentError("hangs"))
    engine.sleep()
    engine.wake()
    engine.update_weights(WEIGHTS, 3)
    assert set(run(engine.generate(REQUEST)).policy_versions) == {3}
    assert engine.restarts == 2


def test_a_proof_goes_on_when_the_replacement_dies_too(start_ours):
    deaths = []

    def dies(fake):
        def generate(body):
            deaths.append(fake)
            threading.Thread(target=fake.close).start()

        if len(deaths) < 2:
            fake.answers["/inference/v1/generate"] = generate

    engine, (fake,) = start_ours(prepare=dies)
    assert engine.describe() == f"server_0 ({fake.url}) serving"
    dies(fake)
    assert set(run(engine.probe(REQUEST))["server_0"].policy_versions) == {1}
    assert (len(deaths), engine.restarts) == (2, 2)


def test_a_death_with_many_requests_in_flight_is_one_warning(start_ours, caplog):
    caplog.set_level(logging.WARNING, "lightning_ppo")
    engine, (fake,) = start_ours()
    fake.answers["/inference/v1/generate"] = fake.hang

    async def ask():
        requests = [replace(REQUEST, request_id=f"draw{number}_g0") for number in range(8)]
        jobs = [asyncio.create_task(engine.generate(request)) for request in requests]
        while fake.paths().count("/inference/v1/generate") < len(jobs):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fake.close)
        return await asyncio.gather(*jobs)

    assert len(run(ask())) == 8
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "is dead" in line and "requests that are sent again: 8" in line]
    assert sum("requests that are sent again" in line for line in lines) == 1
    # the first one that failed, unless the death was seen before it
    assert sum("request draw" in line for line in lines) <= 1


def test_a_death_of_a_server_of_the_users_is_one_warning_too(start_fakes, caplog):
    engine, (fake, _) = start_fakes(2, probe_interval_s=60.0)
    engine.update_weights(WEIGHTS, 1)
    fake.answers["/inference/v1/generate"] = fake.hang

    async def ask():
        jobs = [asyncio.create_task(engine.generate(replace(REQUEST, request_id=f"draw{n}_g0"))) for n in range(8)]
        while fake.paths().count("/inference/v1/generate") < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fake.close)
        return await asyncio.gather(*jobs)

    assert len(run(ask())) == 8
    member = engine.fleet.members()[0]
    wait_for(lambda: member.state is MemberState.QUARANTINED)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("request draw" in line for line in lines) == 1
    assert sum("is quarantined" in line and "requests that are sent again: " in line for line in lines) == 1


def test_order_of_calls(start_fakes, make_spec):
    engine, _ = start_fakes(1)
    with pytest.raises(EngineError, match="has no weights yet"):
        run(engine.generate(REQUEST))
    with pytest.raises(EngineError, match="make a new VLLMEngine"):
        engine.start(make_spec())
    engine.close()
    engine.close()
    for call in (engine.check_health, lambda: engine.update_weights(WEIGHTS, 1), lambda: run(engine.generate(REQUEST))):
        with pytest.raises(EngineDiedError, match="is closed"):
            call()
    fresh = VLLMEngine(VLLMConfig(urls=("http://127.0.0.1:9",)))
    assert fresh.describe() == "no vLLM server was started"
    with pytest.raises(EngineError, match="call start first"):
        fresh.check_health()
    fresh.close()


def test_a_server_that_does_not_fit_is_found_at_the_start(fake_server, make_spec):
    fake = fake_server()
    fake.answers["/is_sleeping"] = (200, {"is_sleeping": True})
    engine = VLLMEngine(VLLMConfig(urls=(fake.url,), start_timeout_s=5.0))
    with pytest.raises(EngineError, match=f"server {fake.url} sleeps; wake it"):
        engine.start(make_spec())


def test_a_server_that_is_not_there_is_found_at_the_start(fake_server, make_spec):
    fake = fake_server()
    fake.close()
    engine = VLLMEngine(VLLMConfig(urls=(fake.url,), start_timeout_s=0.5, probe_timeout_s=0.2))
    with pytest.raises(EngineError, match="does not answer /health"):
        engine.start(make_spec())


def test_a_policy_without_a_name_is_found_at_the_start(make_spec):
    engine = VLLMEngine(VLLMConfig(device="cpu"))
    with pytest.raises(EngineError, match="architectures"):
        engine.start(make_spec(architectures=None))


def test_sleep_holds_the_servers_on_a_cpu(start_fakes):
    engine, (fake,) = start_fakes(1, device="cpu")
    engine.update_weights(WEIGHTS, 1)
    fake.calls.clear()
    engine.sleep()
    engine.sleep()
    assert fake.paths() == ["/pause"]
    engine.wake()
    engine.wake()
    assert fake.paths() == ["/pause", "/resume"]
    engine.update_weights((), 2)
    assert fake.paths()[2:] == ["/update_weight_version"]


@pytest.fixture(params=["cpu", "cuda"])
def start_sleepers(request, start_fakes):
    """Engines on pretended servers that can sleep, and the two calls that they get: `start_sleepers(2)`."""

    def start(count):
        engine, fakes = start_fakes(count, device=request.param, can_sleep=True, update_timeout_s=1.0)
        for fake in fakes:
            fake.answers["/sleep"] = fake.answers["/wake_up"] = (200, {})
        engine.update_weights(WEIGHTS, 1)
        for fake in fakes:
            fake.calls.clear()
        return engine, fakes, ("/sleep", "/wake_up") if request.param == "cuda" else ("/pause", "/resume")

    return start


def test_a_server_that_dies_before_its_sleep_does_not_hold_up_the_others(start_sleepers, caplog):
    engine, (good, bad), (sleep, wake) = start_sleepers(2)
    bad.close()
    engine.sleep()
    assert "it does not fall asleep" in caplog.text
    assert [member.url for member in engine.fleet.serving()] == [good.url]
    assert good.paths() == [sleep]
    engine.wake()
    assert good.paths() == [sleep, wake]
    engine.update_weights(WEIGHTS, 2)
    assert set(run(engine.generate(REQUEST)).policy_versions) == {2}


def test_a_server_that_hangs_or_dies_in_its_sleep_does_not_hold_up_the_others(start_sleepers):
    engine, (good, bad), (sleep, wake) = start_sleepers(2)
    engine.sleep()
    bad.answers[wake] = bad.hang
    engine.wake()
    assert good.paths() == [sleep, wake]
    engine.update_weights(WEIGHTS, 2)
    assert [member.url for member in engine.fleet.serving()] == [good.url]


@pytest.mark.parametrize("failing", [0, 1])
def test_if_nobody_sleeps_or_wakes_it_is_an_error(failing, start_sleepers):
    engine, fakes, paths = start_sleepers(2)
    fakes[0].answers[paths[failing]] = (500, {"error": {"message": "no"}})
    fakes[1].close()
    calls, what = (engine.sleep, engine.wake), ("fall asleep", "wake up")
    if failing:
        engine.sleep()
    with pytest.raises(EngineError, match=f"no vLLM server can {what[failing]}: .*500: no"):
        calls[failing]()


def test_a_server_that_was_quarantined_in_its_sleep_wakes_with_the_others(start_sleepers):
    engine, fakes, (_, wake) = start_sleepers(2)
    engine.sleep()
    member = engine.fleet.members()[1]
    (fake,) = (fake for fake in fakes if fake.url == member.url)
    fake.answers["/health"] = (503, {})
    while member.state is not MemberState.QUARANTINED:
        time.sleep(0.01)
    engine.wake()
    assert wake in fake.paths()


def test_weights_that_a_gpu_lost_in_its_sleep_are_sent_again(fake_server, make_spec, transfer_folder):
    fake = fake_server()
    settings = {"transport": "file", "transfer_folder": str(transfer_folder), "device": "cuda"}
    engine = VLLMEngine(VLLMConfig(urls=(fake.url,), **settings), can_sleep=True)
    fake.answers["/sleep"] = fake.answers["/wake_up"] = (200, {})
    try:
        engine.start(make_spec())
        engine.update_weights(WEIGHTS, 1)
        fake.calls.clear()
        engine.sleep()
        engine.wake()
        assert fake.paths() == ["/sleep", "/wake_up"]
        fake.calls.clear()
        # critic warm-up: nothing new to send, but the server has nothing at all
        engine.update_weights((), 2)
        assert fake.paths() == REFIT
        assert fake.version == "2"
    finally:
        engine.close()


def test_bad_combinations_are_found_before_any_server_starts(monkeypatch, make_spec):
    with pytest.raises(ConfigError, match=r"vllm.cores"):
        VLLMEngine(VLLMConfig(cores=(100_000,)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for transport in ("ipc", "nccl"):
        engine = VLLMEngine(VLLMConfig(transport=transport, device="cpu"))
        with pytest.raises(EngineError, match=f"transport={transport} needs CUDA"):
            engine.start(make_spec())
        assert engine.fleet is None


# ---------------------------------------------------------------------- the real server


def test_refits_of_the_engine_reach_the_real_server(engine, make_policy, make_requests, score):
    for version in (201, 202):
        policy = make_policy(version)
        engine.update_weights(policy.state_dict().items(), version)
        (request,) = make_requests(1, 16, stop_token_ids=())
        ((name, answer),) = run(engine.probe(request)).items()
        assert name == "server_0"
        assert set(answer.policy_versions) == {version}
        assert (score(policy, request, answer) - torch.tensor(answer.logprobs)).abs().max() < 1e-4
    engine.update_weights((), 203)
    assert set(run(engine.generate(request)).policy_versions) == {203}
    assert (score(policy, request, run(engine.generate(request))) - torch.tensor(answer.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_are_prefilled_in_pieces(together, engine, make_policy, make_requests, score):
    """Seeded ones as well, on a CPU: vLLM throws a token away after each piece, whose random numbers count as unused.

    The second time the prompts come from the cache, and nothing is thrown away.
    """
    policy = make_policy(204)
    engine.update_weights(policy.state_dict().items(), 204)
    requests = make_requests(3, 12, prompt_length=150, stop_token_ids=())

    async def ask():
        if together:
            return await asyncio.gather(*map(engine.generate, requests))
        return [await engine.generate(request) for request in requests]

    in_pieces, cached = run(ask()), run(ask())
    assert [answer.token_ids for answer in in_pieces] == [answer.token_ids for answer in cached]
    for request, answer in zip(requests, in_pieces, strict=True):
        assert (score(policy, request, answer) - torch.tensor(answer.logprobs)).abs().max() < 1e-4
    assert engine.restarts == 0


def test_sleeping_and_waking_the_real_server(engine, make_policy, make_requests):
    engine.update_weights(make_policy(0).state_dict().items(), 210)
    (request,) = make_requests(1, 8, stop_token_ids=())
    before = run(engine.generate(request))
    engine.sleep()
    assert engine.fleet.serving()[0].control.is_paused(5)
    engine.wake()
    assert run(engine.generate(request)).token_ids == before.token_ids


def test_the_trainer_never_imports_vllm():
    code = (
        "import sys, lightning_ppo.rollout.vllm.engine, lightning_ppo.refit.vllm_backend\n"
        "print([name for name in ('vllm', 'ray', 'lightning') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
