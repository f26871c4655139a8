import asyncio
import errno
import itertools
import json
import logging
import re
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineDiedError,
    EngineError,
    RewardError,
    RolloutError,
)
from lightning_ppo.rollout.failure_class import FailureClass, classify
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.failures import Drop, FailureBudget, Retry, check_drops
from lightning_ppo.rollout.tail import group_alignment

INFRA, DATA, FATAL = FailureClass.INFRA, FailureClass.DATA, FailureClass.FATAL
SKIP = FailureConfig(drop="skip", max_dropped_prompts=1)


def chain(*errors: BaseException) -> BaseException:
    """The first error, caused by the second, and so on."""
    for effect, cause in itertools.pairwise(errors):
        effect.__cause__ = cause
    return errors[0]


def while_handling(error: Exception, handled: Exception, *, silenced: bool = False) -> Exception:
    try:
        try:
            raise handled
        finally:
            raise error
    except Exception as raised:
        raised.__suppress_context__ = silenced
        return raised


def foreign(module: str, *names: str, base: type = Exception) -> Exception:
    """An error of a package that is not installed here; `names` from the base class to its own."""
    kind = base
    for name in names:
        kind = type(name, (kind,), {"__module__": module})
    return kind("foreign")


def with_fields(error: Exception, **fields: Any) -> Exception:
    vars(error).update(fields)
    return error


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class Uncommon(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), INFRA),
        (ConnectionError(), INFRA),
        (ConnectionRefusedError(111, "refused"), INFRA),
        (BrokenPipeError(), INFRA),
        (OSError(errno.ETIMEDOUT, "timed out"), INFRA),
        (OSError(errno.EHOSTUNREACH, "no route to host"), INFRA),
        (OSError(errno.ENETUNREACH, "network is unreachable"), INFRA),
        (socket.gaierror(-2, "name or service not known"), INFRA),
        (EngineError("HTTP 500"), INFRA),
        (OSError(errno.ENOSPC, "disk full"), DATA),
        (FileNotFoundError(2, "no such file"), DATA),
        (ValueError(), DATA),
        (DataError(), DATA),
        (RewardError(), DATA),
        (RuntimeError(), DATA),
        (EngineDiedError(), FATAL),
        (CheckpointError(), FATAL),
        (ConfigError(), FATAL),
        (RolloutError(), FATAL),
        (MemoryError(), FATAL),
        (KeyboardInterrupt(), FATAL),
        (SystemExit(1), FATAL),
        (GeneratorExit(), FATAL),
        (asyncio.CancelledError(), FATAL),
        (Uncommon(), FATAL),
    ],
    ids=repr,
)
def test_the_error_itself(error: BaseException, expected: FailureClass) -> None:
    assert classify(error) is expected


@pytest.mark.parametrize("name", ["status", "status_code"])
@pytest.mark.parametrize(
    ("status", "expected"),
    [(500, INFRA), (503, INFRA), (599, INFRA), (408, INFRA), (429, INFRA)]
    + [(status, DATA) for status in (0, 200, 302, 400, 404, 422, 499, 600, True)],
)
def test_http_status(name: str, status: int, expected: FailureClass) -> None:
    assert classify(with_fields(RuntimeError(), **{name: status})) is expected
    assert classify(with_fields(RuntimeError(), response=Response(status))) is expected


def test_a_request_that_is_refused_for_what_it_asks_is_no_infrastructure() -> None:
    assert classify(with_fields(EngineError("HTTP 400"), status=400)) is DATA
    refused = with_fields(foreign("aiohttp.client_exceptions", "ClientError", "ClientResponseError"), status=404)
    assert classify(refused) is DATA
    assert classify(with_fields(EngineError("HTTP 200"), status=200)) is INFRA
    assert classify(with_fields(EngineError("no code"), status="400")) is INFRA


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (foreign("aiohttp.client_exceptions", "ClientError", "ServerDisconnectedError"), INFRA),
        (foreign("aiohttp.client_exceptions", "ClientError"), INFRA),
        (foreign("aiohttp.other", "SomethingError"), DATA),
        (foreign("my_aiohttp", "ClientError"), DATA),
        # httpx hides the socket's error (`raise ... from None`); the client of an LLM judge chains httpx's.
        (foreign("httpx", "TransportError", "NetworkError", "ConnectError"), INFRA),
        (foreign("httpx", "TransportError", "TimeoutException", "ReadTimeout"), INFRA),
        (foreign("httpx", "TransportError", "UnsupportedProtocol"), DATA),
        (foreign("ray.exceptions", "RayError", "RayActorError", "ActorDiedError"), INFRA),
        (foreign("ray.exceptions", "RayError", "NodeDiedError"), INFRA),
        (foreign("ray.exceptions", "RayError", "ObjectLostError", "OwnerDiedError"), INFRA),
        (foreign("ray.exceptions", "RayError", "WorkerCrashedError"), INFRA),
        (foreign("ray.exceptions", "RayError", "RayTaskError"), DATA),
        (foreign("ray.exceptions", "RayError", "RuntimeEnvSetupError"), DATA),
        (foreign("crayon.exceptions", "RayActorError"), DATA),
        (foreign("ray.exceptions", "RayTaskError(ValueError)", base=ValueError), DATA),
        (foreign("ray.exceptions", "RayTaskError(ConnectionError)", base=ConnectionError), INFRA),
        (with_fields(foreign("ray.exceptions", "RayError", "RayTaskError"), cause=TimeoutError()), INFRA),
        (with_fields(foreign("ray.exceptions", "RayError", "RayTaskError"), cause=ValueError()), DATA),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_packages_that_are_not_imported(error: Exception, expected: FailureClass) -> None:
    assert classify(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (chain(RewardError(), ConnectionError()), INFRA),
        (chain(RewardError(), TimeoutError()), INFRA),
        (chain(RewardError(), ValueError()), DATA),
        (chain(RewardError(), SystemExit(1)), DATA),
        (chain(RewardError(), MemoryError()), DATA),
        (chain(RewardError(), ValueError(), ConnectionError()), INFRA),
        # An explicit data failure wins over what caused it, and infrastructure over what it was caused by.
        (chain(RewardError(), DataError(), ConnectionError()), DATA),
        (chain(DataError(), ConnectionError()), DATA),
        (chain(ConnectionError(), DataError()), INFRA),
        (chain(EngineError(), ValueError()), INFRA),
        # Somebody chose to go on with another error.
        (chain(EngineError(), EngineDiedError()), INFRA),
        (chain(ValueError(), RolloutError()), DATA),
        (chain(EngineDiedError(), ConnectionError()), FATAL),
        (chain(RolloutError(), TimeoutError()), FATAL),
        (while_handling(KeyError(), TimeoutError()), INFRA),
        (while_handling(KeyError(), TimeoutError(), silenced=True), DATA),
        (chain(while_handling(KeyError(), TimeoutError()), ValueError()), DATA),
        (ExceptionGroup("", [ConnectionError(), ValueError()]), INFRA),
        (chain(RewardError(), ExceptionGroup("", [ExceptionGroup("", [ValueError()]), TimeoutError()])), DATA),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), FATAL),
    ],
)
def test_causes(error: BaseException, expected: FailureClass) -> None:
    assert classify(error) is expected


@pytest.mark.parametrize(("depth", "expected"), [(1, INFRA), (7, INFRA), (8, INFRA), (9, DATA)])
@pytest.mark.parametrize("implicit", [False, True])
def test_eight_causes_are_looked_at(depth: int, expected: FailureClass, implicit: bool) -> None:
    error: Exception = ConnectionError()
    for level in range(depth):
        outer = RuntimeError(level)
        error = while_handling(outer, error) if implicit else chain(outer, error)
    assert classify(error) is expected


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is DATA


def budget(**changes: Any) -> FailureBudget:
    return FailureBudget(FailureConfig(**changes))


def exhaust(failures: FailureBudget, draw: int, error: Exception, index: int = 0) -> Drop:
    for _ in range(100):
        decision = failures.decide(draw, error, index)
        if isinstance(decision, Drop):
            return decision
    raise AssertionError("never exhausted")


def test_back_off_doubles_up_to_its_bound() -> None:
    failures = budget(max_infra_attempts=8, backoff_s=1.0, max_backoff_s=30.0)
    delays = [failures.decide(0, EngineError()) for _ in range(7)]
    assert delays == [Retry(delay) for delay in (1, 2, 4, 8, 16, 30, 30)]
    assert failures.retries == failures.counts.retries == 7


def test_back_off_stays_finite_whatever_the_number_of_attempts() -> None:
    failures = budget(max_infra_attempts=3000, backoff_s=0.001, max_backoff_s=5.0)
    assert [failures.decide(0, EngineError()) for _ in range(2999)][-1] == Retry(5.0)
    assert budget(backoff_s=0.0).decide(0, EngineError()) == Retry(0.0)


@pytest.mark.parametrize(
    ("error", "attempts"), [(EngineError("HTTP 500"), 5), (RewardError("it raised"), 2)], ids=["infra", "data"]
)
def test_the_last_attempt_raises_the_error_itself_with_a_note(error: Exception, attempts: int) -> None:
    failures = budget()
    for _ in range(attempts - 1):
        assert isinstance(failures.decide(7, error, 3), Retry)
    with pytest.raises(type(error)) as raised:
        failures.decide(7, error, 3)
    assert raised.value is error
    (note,) = error.__notes__
    kind = classify(error)
    assert note == (
        f"rollout of draw 7, response 3: this used up failures.max_{kind}_attempts={attempts}, "
        "and failures.drop=fail ends the run"
    )


def test_a_single_attempt_means_no_retry() -> None:
    error = EngineError()
    with pytest.raises(EngineError) as raised:
        budget(max_infra_attempts=1).decide(0, error)
    assert raised.value is error


@pytest.mark.parametrize("error", [EngineDiedError("gone"), RolloutError("stopped"), KeyboardInterrupt()], ids=repr)
def test_fatal_errors_pass_at_once_whatever_the_budgets(error: BaseException) -> None:
    failures = budget(drop="skip", max_dropped_prompts=9, max_consecutive_dropped_prompts=9)
    with pytest.raises(type(error)) as raised:
        failures.decide(4, error)
    assert raised.value is error
    assert error.__notes__ == ["rollout of draw 4, response 0: this is fatal and never tried again"]
    assert failures.dropped == {DATA: 0, INFRA: 0}


def test_an_error_that_many_groups_share_gets_one_note() -> None:
    failures, error = budget(), EngineDiedError("gone")
    error.add_note("of its own")
    for draw in range(3):
        with pytest.raises(EngineDiedError):
            failures.decide(draw, error)
    assert len(error.__notes__) == 2


def test_attempts_are_counted_by_draw_and_response_and_class() -> None:
    failures = budget(max_infra_attempts=2, max_data_attempts=2)
    for draw, index, error in itertools.product((0, 1), (0, 1, 2), (EngineError(), RewardError())):
        assert failures.decide(draw, error, index) == Retry(1.0)
    with pytest.raises(RewardError):
        failures.decide(1, RewardError(), 2)


def test_a_commit_forgets_the_failures_of_its_draw_only() -> None:
    failures = budget(max_infra_attempts=2)
    failures.decide(0, EngineError())
    failures.decide(1, EngineError())
    failures.committed(0)
    assert isinstance(failures.decide(0, EngineError()), Retry)
    with pytest.raises(EngineError):
        failures.decide(1, EngineError())


def test_data_drops_are_bounded_over_the_run(caplog: pytest.LogCaptureFixture) -> None:
    failures = budget(drop="skip", max_dropped_prompts=2)
    error = RewardError("reward f failed: KeyError: 'x'\nwith a second line")
    with caplog.at_level(logging.WARNING):
        drop = exhaust(failures, 0, error, 1)
    assert drop.reason == (
        "data: used up failures.max_data_attempts=2, "
        "last with RewardError: reward f failed: KeyError: 'x' with a second line"
    )
    assert "draw 0 is dropped: response 1 used up" in caplog.text
    failures.committed(1)
    exhaust(failures, 2, error)
    assert failures.dropped == {DATA: 2, INFRA: 0}
    assert isinstance(failures.decide(3, error), Retry)
    with pytest.raises(RewardError) as raised:
        failures.decide(3, error)
    assert raised.value is error
    assert "and failures.max_dropped_prompts=2 is used up as well" in error.__notes__[0]


def test_infrastructure_drops_are_bounded_in_a_row() -> None:
    failures = budget(drop="replace", max_consecutive_dropped_prompts=2)
    for draw in (0, 1):
        exhaust(failures, draw, ConnectionError())
    failures.committed(2)
    for draw in (3, 4):
        exhaust(failures, draw, ConnectionError())
    error = ConnectionError()
    with pytest.raises(ConnectionError) as raised:
        exhaust(failures, 5, error)
    assert raised.value is error
    assert "failures.max_consecutive_dropped_prompts=2 is used up as well" in error.__notes__[0]
    assert failures.dropped == {DATA: 0, INFRA: 4}


@pytest.mark.parametrize(
    ("drops", "error"),
    [({"max_dropped_prompts": 5}, EngineError()), ({"max_consecutive_dropped_prompts": 5}, RewardError())],
    ids=["infra", "data"],
)
def test_one_budget_does_not_pay_for_the_other(drops: dict[str, int], error: Exception) -> None:
    with pytest.raises(type(error)):
        exhaust(budget(drop="skip", **drops), 0, error)


def test_a_dropped_draw_starts_afresh() -> None:
    failures = budget(drop="skip", max_dropped_prompts=5)
    exhaust(failures, 0, RewardError())
    assert isinstance(failures.decide(0, RewardError()), Retry)


@pytest.mark.parametrize(
    ("fraction", "groups", "least"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.9, 128, 116), (0.55, 100, 55), (1.0, 7, 7), (0.0, 7, 1), (0.01, 7, 1)],
)
def test_least_groups_of_a_step(fraction: float, groups: int, least: int) -> None:
    limits = {"drop": "skip", "max_dropped_prompts": 1}
    assert FailureConfig(**limits, min_step_fraction=fraction).least_groups(groups) == least
    # their steps never get shorter
    assert FailureConfig().least_groups(groups) == groups
    if fraction != 0.5:
        with pytest.raises(
            ConfigError, match=r"^failures\.min_step_fraction=.* has no effect with drop=fail; set drop=sk"
        ):
            FailureConfig(min_step_fraction=fraction)
    with pytest.raises(ConfigError, match=r"^failures\.min_step_fraction=1\.1 is out of range"):
        FailureConfig(min_step_fraction=1.1)


def test_drops_survive_a_restart() -> None:
    limits = {"drop": "skip", "max_dropped_prompts": 2, "max_consecutive_dropped_prompts": 2}
    failures = budget(**limits)
    exhaust(failures, 0, RewardError())
    exhaust(failures, 1, EngineError())
    state = json.loads(json.dumps(failures.state_dict()))
    assert state == {"dropped_data": 1, "dropped_infra": 1, "consecutive_dropped": 1}
    resumed = budget(**limits)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    exhaust(resumed, 2, RewardError())
    exhaust(resumed, 3, EngineError())
    for error in (RewardError(), EngineError()):
        with pytest.raises(type(error)):
            exhaust(resumed, 4, error)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"dropped_data": 1, "dropped_infra": 1},
        {"dropped_data": 1, "dropped_infra": 1, "consecutive_dropped": -1},
        {"dropped_data": 1, "dropped_infra": 1.5, "consecutive_dropped": 0},
        {"dropped_data": 1, "dropped_infra": 1, "consecutive_dropped": 0, "more": 0},
    ],
)
def test_a_state_that_is_none_is_refused_whole(state: dict[str, Any]) -> None:
    failures = budget(drop="skip", max_dropped_prompts=2)
    with pytest.raises(CheckpointError, match="the checkpoint's dropped prompts are ") as raised:
        failures.load_state_dict(state)
    assert "\n" not in str(raised.value)
    assert failures.state_dict() == {"dropped_data": 0, "dropped_infra": 0, "consecutive_dropped": 0}


def test_skip_is_accepted_where_any_number_of_groups_divides() -> None:
    check_drops(SKIP, samplers_stamp=True, align=1, groups_per_step=8, generations=4)


@pytest.mark.parametrize(
    "config", [FailureConfig(), FailureConfig(drop="replace", max_dropped_prompts=3)], ids=["fail", "replace"]
)
def test_steps_that_keep_their_size_need_nothing(config: FailureConfig) -> None:
    check_drops(config, samplers_stamp=False, align=8, groups_per_step=1, generations=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"samplers_stamp": False},
            "failures.drop=skip needs a sampler that gives every group its step; "
            "set sampler=in_order, or set failures.drop=replace",
        ),
        (
            {"groups_per_step": 1},
            "failures.drop=skip leaves nothing of a step of one group; set failures.drop=replace",
        ),
        (
            {"align": 2, "generations": 6, "row_multiple": 4},
            "failures.drop=skip leaves steps that do not divide over ranks and micro-batches, which share multiples of "
            "2 groups; set num_generations_per_prompt=8, or set failures.drop=replace",
        ),
        ({"align": 2, "generations": 6, "row_multiple": 12}, "set num_generations_per_prompt=12,"),
        ({"align": 2, "generations": 6}, "set num_generations_per_prompt=12,"),
        ({"align": 8, "generations": 1, "row_multiple": 8}, "set num_generations_per_prompt=8,"),
    ],
)
def test_skip_is_rejected_with_what_would_work(changes: dict[str, Any], message: str) -> None:
    arguments = {"samplers_stamp": True, "align": 1, "groups_per_step": 8, "generations": 4} | changes
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        check_drops(SKIP, **arguments)
    assert "\n" not in str(raised.value)


@settings(deadline=None)
@given(
    st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.lists(st.integers(1, 24), max_size=3)
)
def test_the_number_is_the_smallest_that_works(generations: int, dp: list[int], micro: list[int]) -> None:
    def align(size: int) -> int:
        return group_alignment(generations=size, dp_sizes=dp, micro_batch_rows=micro)

    def named(**known: int) -> int:
        with pytest.raises(ConfigError) as raised:
            check_drops(SKIP, samplers_stamp=True, align=now, groups_per_step=8, generations=generations, **known)
        found = re.search(r"num_generations_per_prompt=(\d+)", str(raised.value))
        assert found is not None
        return int(found[1])

    now = align(generations)
    if now == 1:
        check_drops(SKIP, samplers_stamp=True, align=now, groups_per_step=8, generations=generations)
        return
    smallest = next(size for size in itertools.count(generations) if align(size) == 1)
    assert named(row_multiple=align(1)) == smallest
    # Without the multiple the number works too, though a smaller one may.
    assert align(named()) == 1
    assert named() >= smallest


def test_row_multiple_and_align_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="row_multiple=8 and generations=4 do not give align=1"):
        check_drops(SKIP, samplers_stamp=True, align=1, groups_per_step=8, generations=4, row_multiple=8)
