"""The engine's process gives its memory back and takes it again: nothing of what it serves changes."""

import asyncio
import gc
import os
import queue
import signal
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import Generation, PolicySpec
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.local.protocol import Abort, Done, Finished, Refused, SetSleep, Start, Submit, Unserved
from lightning_ppo.rollout.local.worker import Worker

BACKENDS = pytest.mark.parametrize("backend", ["native", "transformers"])


class Replies:
    """The trainer's end of the line, in this process."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, reply: Any) -> None:
        self.sent.append(reply)

    def last(self) -> Any:
        return self.sent[-1]


@pytest.fixture
def worker(policy: Any) -> Callable[[str], tuple[Worker, Replies]]:
    """The engine's inside with its commands, without its process; weights are loaded as if they had been sent."""

    def make(backend: str) -> tuple[Worker, Replies]:
        model, replies = policy("llama"), Replies()
        spec = PolicySpec(model.config.to_json_string(use_diff=False), 64)
        config = LocalEngineConfig(slots=4, backend=backend)  # type: ignore[arg-type]
        made = Worker(replies, None, Start(spec, config))  # type: ignore[arg-type]

        shared = SimpleNamespace(views=dict(model.state_dict()))
        made._weights = shared  # type: ignore[assignment]
        made._version = 3
        assert made._scheduler is not None
        made._scheduler.load(made._skeleton.canonical(shared.views))
        return made, replies

    return make


def finish(worker: Worker) -> Finished:
    while True:
        assert worker._scheduler is not None
        finished = worker._scheduler.step(worker._version)
        if finished is not None:
            return finished


@BACKENDS
def test_sleep_frees_everything_and_wake_serves_the_same(worker, request_of, backend: str) -> None:
    made, replies = worker(backend)
    submit = Submit(7, request_of((1, 2, 3), seed=4))
    made._carry_out(submit)
    before = finish(made)
    made._carry_out(SetSleep(True))
    assert replies.last() == Done(3)
    assert made._scheduler is None, "nothing holds the cache and the weights"
    made._carry_out(SetSleep(True))
    made._carry_out(Abort(99))
    made._carry_out(SetSleep(False))
    made._carry_out(SetSleep(False))
    assert replies.sent[-3:] == [Done(3)] * 3
    made._carry_out(submit)
    after = finish(made)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()
    assert after.versions.tolist() == before.versions.tolist()


@BACKENDS
def test_sleep_with_responses_in_flight_is_refused_and_loses_none(worker, request_of, backend: str) -> None:
    made, replies = worker(backend)
    made._carry_out(Submit(7, request_of((1, 2, 3), seed=4)))
    for _ in range(2):
        made._carry_out(SetSleep(True))
        assert isinstance(replies.last(), Refused)
        assert "would lose the responses in flight" in replies.last().reason
        assert "\n" not in replies.last().reason
        made._scheduler.step(3)
    assert finish(made).keys == (7,)
    made._carry_out(Submit(8, request_of((1, 2, 3), seed=4)))
    made._carry_out(Abort(8))
    made._carry_out(SetSleep(True))
    assert replies.last() == Done(3), "what was cancelled holds nothing up"


@BACKENDS
def test_a_request_that_comes_too_late_is_answered(worker, request_of, backend: str) -> None:
    made, replies = worker(backend)
    made._carry_out(SetSleep(True))
    made._carry_out(Submit(7, request_of((1, 2, 3))))
    assert replies.last() == Unserved(7, "engine=local is asleep; call wake first")


@pytest.fixture
def started(policy: Any) -> Iterator[Callable[..., tuple[LocalEngine, Any]]]:
    engines = []

    def start(backend: str = "native", **settings: Any) -> tuple[LocalEngine, Any]:
        engine = LocalEngine(LocalEngineConfig(slots=4, backend=backend, **settings))  # type: ignore[arg-type]
        engines.append(engine)
        model = policy("llama")
        engine.start(PolicySpec(model.config.to_json_string(use_diff=False), 4000))
        return engine, model

    yield start
    for engine in engines:
        engine.close()


def test_an_engine_that_was_never_started_has_nothing_to_sleep_with() -> None:
    engine = LocalEngine(LocalEngineConfig())
    with pytest.raises(EngineError, match="not running; call start first"):
        engine.sleep()
    engine.wake()


@pytest.mark.slow
@BACKENDS
def test_a_night_of_the_engine(started, policy, request_of, sample_all, backend: str) -> None:
    engine, model = started(backend)
    engine.sleep()
    engine.wake()
    with pytest.raises(EngineError, match="no weights yet"):
        sample_all(engine, [request_of((1, 2))])
    engine.update_weights(model.state_dict().items(), 0)
    requests = [request_of((1, 2, 3), seed=seed, stop_token_ids=(4,)) for seed in range(3)]

    def sample() -> list[Generation]:
        # one by one: the transformers backend's last bits depend on what else is in the batch
        return [sample_all(engine, [request])[0] for request in requests]

    before = sample()
    engine.sleep()
    engine.sleep()
    for ask in (engine.generate, engine.probe):
        with pytest.raises(EngineError, match="engine=local is asleep; call wake first") as raised:
            asyncio.run(ask(requests[0]))
        assert "\n" not in str(raised.value)
    engine.check_health()
    engine.wake()
    engine.wake()
    assert sample() == before
    assert asyncio.run(engine.probe(requests[0])) == {"local": before[0]}
    # what is sent to a sleeping engine is what it wakes up with
    other = policy("llama", seed=1)
    engine.sleep()
    engine.update_weights(other.state_dict().items(), 1)
    engine.wake()
    new = sample()
    assert {version for row in new for version in row.policy_versions} == {1}
    assert [row.logprobs for row in new] != [row.logprobs for row in before]
    engine.update_weights(model.state_dict().items(), 0)
    assert sample() == before
    # an update that fails half-way leaves no half to wake up with
    broken = [*other.state_dict().items()][:2]
    with pytest.raises(EngineError, match="is missing"):
        engine.update_weights(broken, 2)
    assert sample() == before
    with pytest.raises(EngineError, match="weights=incomplete since the last update failed"):
        engine.sleep()
    engine.update_weights(model.state_dict().items(), 0)
    engine.sleep()
    with pytest.raises(EngineError, match="is missing"):
        engine.update_weights(broken, 2)
    with pytest.raises(EngineError, match="weights=incomplete since the last update failed"):
        engine.wake()
    engine.update_weights(model.state_dict().items(), 0)
    engine.wake()
    assert sample() == before
    engine.sleep()
    engine.close()
    engine.close()
    with pytest.raises(EngineDiedError, match="closed"):
        sample()


@pytest.mark.slow
def test_sleep_waits_for_nobody(started, request_of) -> None:
    engine, model = started()
    engine.update_weights(model.state_dict().items(), 0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(engine.generate(request_of((1, 2, 3), max_tokens=3900)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="would lose the responses in flight; wait for them, or cancel them"):
            await loop.run_in_executor(None, engine.sleep)
        short = await asyncio.wait_for(engine.generate(request_of((1, 2), max_tokens=3)), 30)
        assert len(short.token_ids) == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop.run_in_executor(None, engine.sleep)
        # a request that slipped through while the engine fell asleep
        engine._asleep = False
        with pytest.raises(EngineError, match="engine=local is asleep; call wake first"):
            await asyncio.wait_for(engine.generate(request_of((1, 2), max_tokens=3)), 30)
        engine._asleep = True

    asyncio.run(run())
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="signal 9"):
        engine.wake()


def test_nothing_holds_the_memory_of_a_sleeping_engine(worker) -> None:
    made, _ = worker("native")
    decoder = made._scheduler._decoder
    alive = [weakref.ref(tensor) for tensor in (decoder._cache, decoder._embed, decoder._head)]
    del decoder
    made._carry_out(SetSleep(True))
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


class Night(BaseException):
    """Ends `serve`, which runs for ever."""


@BACKENDS
def test_what_the_scheduler_held_is_free_before_the_device_gives_its_memory_back(
    worker, request_of, monkeypatch, backend: str
) -> None:
    made, replies = worker(backend)
    scheduler = weakref.ref(made._scheduler)
    inbox = queue.SimpleQueue()
    inbox.put([Submit(7, request_of((1, 2, 3), seed=4))])
    seen = []

    def send(reply: Any) -> None:
        if isinstance(reply, Finished):
            inbox.put([SetSleep(True)])
        elif reply == Done(3):
            raise Night

    monkeypatch.setattr(replies, "send", send)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(scheduler()))
    gc.disable()
    try:
        with pytest.raises(Night):
            made.serve(inbox)
    finally:
        gc.enable()
    assert seen == [None]
