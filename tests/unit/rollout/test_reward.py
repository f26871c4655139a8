import asyncio
import functools
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ppo.errors import ConfigError, RewardError
from lightning_ppo.rollout.reward import RewardFunction, resolve_reward
from lightning_ppo.testing import make_prompt


def call(reward: Any, response: str = "r", finish: Any = "stop", timeout_s: float = 5.0, **columns: Any) -> float:
    function = RewardFunction(reward, frozenset(columns), timeout_s)
    return asyncio.run(function(make_prompt(row=3, **columns), response, finish))


def test_it_gets_what_it_names_and_nothing_else() -> None:
    seen = {}

    def reward(response, answer, prompt):
        seen.update(response=response, answer=answer, prompt=prompt)
        return 1

    assert call(reward, answer="a", other=2) == 1.0
    assert seen == {"response": "r", "answer": "a", "prompt": "^a="}


def test_keyword_arguments_get_every_column() -> None:
    seen = {}

    def reward(response, **rest):
        seen.update(rest)
        return 0.0

    call(reward, answer="a", other=2)
    assert seen == {"prompt": "^a=", "answer": "a", "other": 2}


class RewardModel(torch.nn.Module):
    def forward(self, response, answer):
        return torch.tensor(float(response == answer))


def test_a_torch_module_gets_what_its_forward_names() -> None:
    assert call(RewardModel(), answer="r", other=2) == 1.0
    with pytest.raises(ConfigError, match=r"^reward=RewardModel asks for answer, which is neither prompt nor "):
        RewardFunction(RewardModel(), frozenset({"other"}))


def test_positions_alone_are_refused() -> None:
    """It would be called with nothing at all."""
    with pytest.raises(ConfigError, match=r"^reward=.*takes nothing by name; give it prompt, response or columns$"):
        RewardFunction(lambda *arguments: float(len(arguments)), frozenset({"answer"}))


def test_finish_reason_when_named_unless_a_column_has_the_name() -> None:
    def reward(finish_reason):
        return {"length": 1.0, "stop": 2.0, "column": 3.0}[finish_reason]

    assert call(reward, finish="length") == 1.0
    assert call(reward, finish="length", finish_reason="column") == 3.0


def test_column_that_only_some_rows_have_needs_a_default() -> None:
    def reward(response, bonus=0.5):
        return bonus

    function = RewardFunction(reward, frozenset())
    assert asyncio.run(function(make_prompt(), "r", "stop")) == 0.5
    assert asyncio.run(function(make_prompt(bonus=2), "r", "stop")) == 2.0


def test_unknown_parameter_names_it_and_the_columns() -> None:
    def reward(response, label):
        return 0.0

    with pytest.raises(ConfigError, match=r"asks for label.*columns \(answer, level\)"):
        RewardFunction(reward, frozenset({"level", "answer"}))
    with pytest.raises(ConfigError, match=r"columns \(none\)"):
        RewardFunction(reward, frozenset())


def test_positional_only_parameter_and_hidden_response_are_rejected() -> None:
    def reward(response, /):
        return 0.0

    with pytest.raises(ConfigError, match="positional-only parameter response"):
        RewardFunction(reward, frozenset())
    with pytest.raises(ConfigError, match="column=response hides"):
        RewardFunction(lambda response: 0.0, frozenset({"response"}))


class Judge:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    async def __call__(self, response: str) -> float:
        await asyncio.sleep(0)
        return self.scale * len(response)

    def method(self, response: str) -> float:
        return -self.scale


async def slow(response: str) -> float:
    await asyncio.sleep(0)
    return 4.0


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Judge(2.0), 4.0),
        (Judge(2.0).method, -2.0),
        (slow, 4.0),
        (functools.partial(lambda response, scale: scale, scale=3), 3.0),
        (lambda response: slow(response), 4.0),
    ],
)
def test_kinds_of_callables(reward: Any, expected: float) -> None:
    assert call(reward, response="rr") == expected


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.array(1.0),
        torch.tensor(1),
        torch.ones((), dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(True),
        Fraction(1),
    ],
)
def test_numbers_that_are_accepted(value: Any) -> None:
    result = call(lambda response: value)
    assert result == 1.0
    assert type(result) is float


def test_a_reward_that_training_cannot_hold_is_an_error_and_not_a_loss_of_nan() -> None:
    assert call(lambda response: -1e19) == -1e19
    for value in (1e300, -1e20, 2.0**64, np.float64(3e38)):
        with pytest.raises(
            RewardError, match=r"failed: ValueError: it returned \S+, but float32 holds squares of up to "
        ):
            call(lambda response, value=value: value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1",
        [1.0],
        torch.ones(1),
        torch.tensor(math.nan),
        np.ones(1),
        1j,
        10**400,
        Decimal(1),
        np.array("1"),
        b"1",
        {},
    ],
)
def test_anything_else_is_an_error_that_names_the_prompt(value: Any) -> None:
    with pytest.raises(RewardError, match=r"prompt row 3, counted from 0: '\^a='") as error:
        call(lambda response: value)
    assert error.value.__cause__ is not None
    assert "\n" not in str(error.value)


def test_exception_is_chained_and_long_prompts_are_shortened() -> None:
    cause = KeyError("two\nlines")

    def reward(response):
        raise cause

    function = RewardFunction(reward, frozenset())
    with pytest.raises(RewardError, match="failed: KeyError") as error:
        asyncio.run(function(make_prompt(token_ids=(6,) * 500), "r", "stop"))
    assert error.value.__cause__ is cause
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)


def test_asynchronous_reward_has_a_deadline() -> None:
    async def hangs(response):
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"took longer than reward_timeout_s=0\.01"):
        call(hangs, timeout_s=0.01)


def test_timeout_of_the_rewards_own_is_not_taken_for_the_deadline() -> None:
    async def reward(response):
        raise TimeoutError("backend")

    with pytest.raises(RewardError, match="failed: TimeoutError: backend"):
        call(reward)


# A task group would take these for a group that was given up on purpose, or end the event loop.
@pytest.mark.parametrize(
    ("raised", "message"), [(asyncio.CancelledError(), "cancelled from within"), (SystemExit(2), "SystemExit")]
)
def test_cancellation_and_exit_from_within_are_errors(raised: BaseException, message: str) -> None:
    async def reward(response):
        raise raised

    with pytest.raises(RewardError, match=message):
        call(reward)


def test_real_cancellation_stays_one() -> None:
    async def hangs(response):
        await asyncio.Event().wait()

    async def main() -> None:
        function = RewardFunction(hangs, frozenset())
        task = asyncio.create_task(function(make_prompt(), "r", "stop"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 5))


def test_import_paths(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Box:\n    value: 'float'\n"
        "def score(response):\n    return Box(2.5).value\n"
    )
    assert call(f"{path}:score") == 2.5
    assert resolve_reward("math:sqrt") is math.sqrt
    assert resolve_reward(math.sqrt) is math.sqrt


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("math", "is no import path"),
        ("math:", "is no import path"),
        (":sqrt", "is no import path"),
        ("no_such_module_at_all:f", "cannot be imported (ModuleNotFoundError"),
        ("math:nothing", "math has no nothing"),
        ("math:pi", "is not callable"),
        ("/nowhere/reward.py:f", "no file /nowhere/reward.py"),
        (3, "is not callable"),
    ],
)
def test_bad_import_path(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_reward(reward)
    assert message in str(error.value)


def test_file_that_fails_to_import_chains_its_error(tmp_path: Path) -> None:
    path = tmp_path / "broken_reward.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="cannot be imported") as error:
        resolve_reward(f"{path}:f")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
