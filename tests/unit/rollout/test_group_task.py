import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

from lightning_ppo.errors import EngineDiedError, EngineError, RewardError, RolloutError
from lightning_ppo.rollout.engine import GenerationRequest, SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.failures import FailureBudget
from lightning_ppo.rollout.group_task import DroppedPrompt, GroupTask
from lightning_ppo.rollout.responses import Responder
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.stream import sample_seed
from lightning_ppo.testing import FakeEngine, make_prompt, make_trajectory

PROMPT = make_prompt()
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


class Engine(FakeEngine):
    """Knows what runs, and fails what `script` says: by request id, one error per call, None for an answer."""

    def __init__(self, script: Callable[[GenerationRequest], BaseException | None] = lambda request: None, **settings):
        super().__init__(fails=script, **settings)
        self.running: set[str] = set()

    async def generate(self, request: GenerationRequest) -> Any:
        assert request.request_id not in self.running
        self.running.add(request.request_id)
        try:
            return await super().generate(request)
        finally:
            self.running.discard(request.request_id)

    @property
    def asked(self) -> list[str]:
        return [request.request_id for request in self.requests]


class Sleep:
    """Turns of the loop instead of time."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    async def __call__(self, delay_s: float) -> None:
        self.delays.append(delay_s)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def make(tokenizer: Any) -> Callable[..., GroupTask]:
    def build(
        engine: FakeEngine,
        size: int = 2,
        *,
        reward: Any = lambda response: 1.0,
        budget: FailureBudget | None = None,
        sleep: Callable[[float], Awaitable[object]] | None = None,
        draw: int = 5,
        **settings: Any,
    ) -> GroupTask:
        return GroupTask(
            Responder(engine, RewardFunction(reward, frozenset()), tokenizer),
            PROMPT,
            draw,
            f"draw{draw}",
            SamplingParams(max_tokens=6, stop_token_ids=(1,)),
            size,
            17,
            FailureBudget(FailureConfig()) if budget is None else budget,
            sleep=Sleep() if sleep is None else sleep,
            **settings,
        )

    return build


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 20))


def fails_at(*places: tuple[int, int], error: Callable[[], BaseException] = lambda: EngineError("HTTP 500")) -> Any:
    """Fail the given attempts: (response, attempt)."""
    names = {f"draw5_g{index}" + (f"_try{attempt}" if attempt else "") for index, attempt in places}
    return lambda request: error() if request.request_id in names else None


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@SIZES
def test_all_responses_run_at_once_and_come_in_order(make, size: int) -> None:
    engine = Engine(holds=lambda request: True)
    task = make(engine, size)

    async def main() -> Any:
        running = asyncio.create_task(task.run())
        await turns(5)
        assert len(engine.running) == size
        for index in reversed(range(size)):
            engine.let_go(f"draw5_g{index}")
            await turns(3)
        return await running

    group = run(main())
    assert [trajectory.sample_id for trajectory in group] == [f"draw5_g{index}" for index in range(size)]
    assert sorted(engine.asked) == [f"draw5_g{index}" for index in range(size)]
    by_name = {request.request_id: request for request in engine.requests}
    for index in range(size):
        request = by_name[f"draw5_g{index}"]
        assert request.seed == sample_seed(17, 5, index)
        assert request.prompt_ids == PROMPT.token_ids
    assert task.finished == dict(enumerate(group))


@SIZES
def test_only_failed_responses_are_sampled_again_with_the_same_seed_and_a_fresh_name(make, size: int) -> None:
    whole = run(make(Engine(), size).run())
    last = size - 1
    engine, sleep = Engine(fails_at((last, 0), (last, 1))), Sleep()
    group = run(make(engine, size, sleep=sleep).run())
    retried = [request for request in engine.requests if request.request_id.startswith(f"draw5_g{last}")]
    assert [request.request_id for request in retried] == [f"draw5_g{last}{end}" for end in ("", "_try1", "_try2")]
    assert len({request.seed for request in retried}) == 1
    assert len(engine.requests) == size + 2
    assert sleep.delays == [1.0, 2.0]
    for got, wanted in zip(group, whole, strict=True):
        assert got.sample_id == wanted.sample_id
        assert torch.equal(got.response_ids, wanted.response_ids)
        assert torch.equal(got.rollout_logprobs, wanted.rollout_logprobs)


def test_an_outage_that_fails_all_siblings_is_one_attempt(make) -> None:
    outage = fails_at(*[(index, attempt) for index in range(4) for attempt in range(4)])
    engine, sleep = Engine(outage), Sleep()
    assert len(run(make(engine, 4, sleep=sleep).run())) == 4
    assert len(engine.requests) == 4 * 5
    assert sorted(sleep.delays) == sorted([1.0, 2.0, 4.0, 8.0] * 4)


# Pitfall 82.
@SIZES
@pytest.mark.parametrize("failing", ["engine", "reward", "slow reward"])
def test_a_failed_group_is_never_a_row(make, tokenizer, size: int, failing: str) -> None:
    causes = []

    def reward(response: str) -> float:
        causes.append(ZeroDivisionError())
        raise causes[-1]

    async def slow(response: str) -> float:
        await asyncio.sleep(0)
        return reward(response)

    error = EngineError("HTTP 500")
    engine = Engine((lambda request: error) if failing == "engine" else (lambda request: None))
    task = make(engine, size, reward={"reward": reward, "slow reward": slow}.get(failing, lambda response: 1.0))
    with pytest.raises(EngineError if failing == "engine" else RewardError) as raised:
        run(task.run())
    assert task.finished == {}
    assert engine.running == set()
    if failing == "engine":
        assert raised.value is error
    else:
        assert raised.value.__cause__ in causes
    assert "rollout of draw 5, response " in raised.value.__notes__[0]


@SIZES
def test_a_dropped_prompt_is_counted_once_though_all_its_responses_failed(make, size: int) -> None:
    budget = FailureBudget(FailureConfig(drop="skip", max_dropped_prompts=1))

    def reward(response: str) -> float:
        raise KeyError("x")

    with pytest.raises(DroppedPrompt) as raised:
        run(make(Engine(), size, reward=reward, budget=budget).run())
    assert raised.value.draw == 5
    assert raised.value.reason.startswith("data: used up failures.max_data_attempts=2, last with RewardError")
    assert isinstance(raised.value.__cause__, RewardError)
    assert budget.state_dict()["dropped_data"] == 1


def test_siblings_that_are_used_up_in_the_same_moment_cost_one_drop(make) -> None:
    budget = FailureBudget(FailureConfig(drop="skip", max_infra_attempts=1, max_consecutive_dropped_prompts=1))

    class Together(Engine):
        async def generate(self, request):
            await super().generate(request)
            raise EngineError("HTTP 500")

    engine = Together(holds=lambda request: True)

    async def main() -> None:
        running = asyncio.create_task(make(engine, 3, budget=budget).run())
        await turns(5)
        engine.let_go("draw5_g1")
        engine.let_go("draw5_g2")
        await running

    with pytest.raises(DroppedPrompt):
        run(main())
    assert budget.state_dict()["consecutive_dropped"] == 1
    assert engine.cancelled == ["draw5_g0"]


def test_a_drop_aborts_the_siblings(make) -> None:
    budget = FailureBudget(FailureConfig(drop="skip", max_infra_attempts=1, max_consecutive_dropped_prompts=1))
    engine = Engine(fails_at((1, 0)), holds=lambda request: request.request_id == "draw5_g3")
    task = make(engine, 4, budget=budget)
    with pytest.raises(DroppedPrompt):
        run(task.run())
    assert "draw5_g3" in engine.cancelled
    assert engine.running == set()
    assert set(task.finished) <= {0, 2}


@pytest.mark.parametrize("fatal", range(4))
@pytest.mark.parametrize("kind", [EngineDiedError, RolloutError, MemoryError])
def test_a_fatal_error_cancels_the_siblings_and_passes_as_it_is(make, fatal: int, kind: type[Exception]) -> None:
    error = kind("gone")
    engine = Engine(fails_at((fatal, 0), error=lambda: error), holds=lambda request: True)
    with pytest.raises(kind) as raised:
        run(make(engine, 4).run())
    assert raised.value is error
    assert engine.running == set()
    assert len(engine.requests) <= 4
    assert sorted(engine.cancelled) == sorted(name for name in engine.asked if name != f"draw5_g{fatal}")


@pytest.mark.parametrize("fatal", [1, 2])
@pytest.mark.parametrize("drop", ["fail", "skip"])
def test_errors_of_the_same_moment_end_as_the_fatal_one(make, fatal: int, drop: str) -> None:
    # Responses 1 and 2 are answered in the same turn of the loop: the first to fail has not aborted the other yet.
    error = EngineDiedError("gone")
    spare = {} if drop == "fail" else {"max_consecutive_dropped_prompts": 1, "max_infra_attempts": 1}
    budget = FailureBudget(FailureConfig(drop=drop, **spare))
    raised: list[str] = []

    class Together(Engine):
        async def generate(self, request):
            await super().generate(request)
            raised.append(request.request_id)
            raise error if request.request_id == f"draw5_g{fatal}" else EngineError("HTTP 500")

    engine = Together(holds=lambda request: True)

    async def main() -> None:
        running = asyncio.create_task(make(engine, 3, budget=budget).run())
        await turns(5)
        engine.let_go("draw5_g1")
        engine.let_go("draw5_g2")
        await running

    with pytest.raises(EngineDiedError) as ended:
        run(main())
    assert ended.value is error
    assert raised == ["draw5_g1", "draw5_g2"]
    assert engine.cancelled == ["draw5_g0"]
    assert len(engine.requests) == 3


@pytest.mark.parametrize("failing", [{0, 2}, {1, 2}, {0, 1}], ids=str)
def test_no_attempt_starts_once_a_sibling_has_ended_the_group(make, failing: set[int]) -> None:
    # The waits for another attempt end at every moment around the fatal error, its own turn of the loop included.
    (fatal,) = {0, 1, 2} - failing
    events: list[str] = []

    class Watched(Engine):
        async def generate(self, request):
            events.append(request.request_id)
            try:
                return await super().generate(request)
            except EngineDiedError:
                events.append("death")
                raise

    async def main(lag: int) -> None:
        gate = asyncio.Event()

        async def sleep(delay_s: float) -> None:
            await gate.wait()

        script = fails_at(*[(index, 0) for index in failing])
        engine = Watched(script, holds=lambda request: request.request_id == f"draw5_g{fatal}")
        events.clear()
        running = asyncio.create_task(make(engine, 3, sleep=sleep).run())
        await turns(5)
        engine.die()
        await turns(lag)
        gate.set()
        with pytest.raises(EngineDiedError):
            await running
        assert "_try" not in "".join(events[events.index("death") :])
        assert engine.running == set()

    for lag in range(8):
        run(main(lag))


@SIZES
def test_a_request_that_the_engine_cancels_does_not_look_given_up_on_purpose(make, size: int) -> None:
    for index in range(size):
        engine = Engine(fails_at((index, 0), error=asyncio.CancelledError))
        with pytest.raises(RolloutError, match=f"the engine cancelled request draw5_g{index}"):
            run(make(engine, size).run())
        assert engine.running == set()


def test_a_later_failure_is_not_blamed_on_an_earlier_one(make) -> None:
    # Were it raised while the first is handled, Python would chain them, and a bug would pass for infrastructure.
    calls = []

    def reward(response: str) -> float:
        calls.append(response)
        raise ConnectionError if len(calls) == 1 else ValueError(f"call {len(calls)}")

    with pytest.raises(RewardError, match="call 3"):
        run(make(Engine(), 1, reward=reward).run())
    assert len(calls) == 3, "one failure of infrastructure, two of data"


def test_finished_siblings_survive_a_restart_and_are_not_generated_again(make) -> None:
    first = Engine(holds=lambda request: request.request_id in ("draw5_g1", "draw5_g2"))
    task = make(first, 4)

    async def interrupted() -> None:
        running = asyncio.create_task(task.run())
        while len(task.finished) < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(interrupted())
    assert sorted(task.finished) == [0, 3]
    second = Engine()
    again = make(second, 4, finished=task.finished, first_attempt=task.next_attempt)
    group = run(again.run())
    assert second.asked == ["draw5_g1_try1", "draw5_g2_try1"]
    assert group[0] is task.finished[0]
    assert group[3] is task.finished[3]
    assert sorted(task.finished) == [0, 3], "the mapping handed in is not changed"
    whole = run(make(Engine(), 4).run())
    for got, wanted in zip(group, whole, strict=True):
        assert got.sample_id == wanted.sample_id
        assert torch.equal(got.response_ids, wanted.response_ids)


def test_a_complete_group_asks_for_nothing(make) -> None:
    engine = Engine()
    finished = {index: make_trajectory(f"draw5_g{index}") for index in (1, 0)}
    assert run(make(engine, 2, finished=finished).run()) == (finished[0], finished[1])
    assert engine.requests == []


@pytest.mark.parametrize("index", [-1, 2])
def test_finished_siblings_of_another_group_size_are_refused(make, index: int) -> None:
    with pytest.raises(ValueError, match=r"finished=\[.*\] does not fit a group of 2"):
        make(FakeEngine(), 2, finished={index: make_trajectory()})


def test_the_next_attempt_has_a_number_that_was_never_used(make) -> None:
    task = make(Engine(fails_at((0, 0), (1, 0), (1, 1))), 2)
    assert task.next_attempt == 1
    run(task.run())
    assert task.next_attempt == 3
    engine = Engine()
    later = make(engine, 2, first_attempt=3)
    run(later.run())
    assert sorted(engine.asked) == ["draw5_g0_try3", "draw5_g1_try3"]
    assert later.next_attempt == 4


# Pitfall 86; the permit of the group comes back because its task ends.
@SIZES
@pytest.mark.parametrize("place", ["engine", "wait", "reward", "anywhere"])
def test_cancelling_at_every_await_leaves_nothing_running(make, size: int, place: str) -> None:
    async def reward(response: str) -> float:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return 1.0

    failing = [(index, 0) for index in range(size)] if place in ("wait", "anywhere") else []

    async def main() -> int:
        others = asyncio.all_tasks()
        for moment in range(200):
            engine = Engine(fails_at(*failing, (size - 1, 0)) if failing else lambda request: None)
            rewards = reward if place in ("reward", "anywhere") else lambda response: 1.0
            budget = FailureBudget(FailureConfig())
            task = make(engine, size, reward=rewards, budget=budget)
            running = asyncio.create_task(task.run())
            await turns(moment)
            if running.done():
                assert len(running.result()) == size
                return moment
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert engine.running == set()
            assert asyncio.all_tasks() == others
            asked = len(engine.requests)
            await turns(10)
            assert len(engine.requests) == asked
            assert len(task.finished) <= size
        raise AssertionError("never finished")

    assert run(main()) >= 2


@SIZES
def test_an_engine_that_fails_over_an_abort_neither_keeps_the_task_nor_costs_an_attempt(make, size: int) -> None:
    class Sore(Engine):
        async def generate(self, request):
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                raise EngineError("cannot abort") from None

    engine, budget = Sore(holds=lambda request: "_try" not in request.request_id), FailureBudget(FailureConfig())

    async def main() -> None:
        running = asyncio.create_task(make(engine, size, budget=budget).run())
        await turns(5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(main())
    assert engine.running == set()
    assert len(engine.requests) == size
    assert budget.retries == 0


def test_a_group_cancelled_before_it_started_asks_for_nothing(make) -> None:
    engine = Engine()

    async def main() -> None:
        running = asyncio.create_task(make(engine, 4).run())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(main())
    assert engine.requests == []
