"""The user's reward function: found by import path, inspected once, called by name, its result checked."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_ppo.batch import FinishReason, Prompt
from lightning_ppo.errors import RewardError
from lightning_ppo.imports import import_object
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.validation import reject

_BUILT_IN = frozenset({"prompt", "response"})

_LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""The critic's loss squares what it has to predict, in float32; a larger reward would end the run as a loss of NaN."""


def resolve_reward(reward: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the reward callable itself, or import it.

    Args:
        reward: A callable, `package.module:function`, or `path/to/file.py:function`.

    Raises:
        ConfigError: the path has no `:`, the module or file cannot be imported, or the name is missing or not callable.
    """
    found: Any = import_object("reward", reward) if isinstance(reward, str) else reward
    if not callable(found):
        raise reject("reward", reward, "is not callable", "give a function or its import path")
    return found


class RewardFunction:
    """Calls the reward with exactly what it names, and accepts nothing but a finite number from it (a bool is 0 or 1).

    The callable gets, by name: `prompt` (text), `response` (text without special tokens), the row's other columns, and
    `finish_reason` (`stop` or `length`) unless a column has that name. With `**kwargs` it gets all columns of the row.

    Asynchronous callables run concurrently, each call under the deadline. Synchronous ones run inside the collector's
    event loop: typical rewards take microseconds and a thread would cost more. While one runs no other response is
    handled, so anything slow (a network call, a reward model) belongs into an `async` function.

    Args:
        reward: A callable or its import path, see `resolve_reward`.
        columns: Columns that every row has, without `prompt`.
        timeout_s: Deadline of one asynchronous call.

    Raises:
        ConfigError: a parameter without default is neither `prompt`, `response` nor a column; a parameter can only be
            passed by position; there is none to pass by name; or a column is called `response`.
    """

    def __init__(
        self,
        reward: Callable[..., Any] | str,
        columns: frozenset[str],
        timeout_s: float = RolloutConfig.reward_timeout_s,
    ) -> None:
        self.source = reward
        """The callable or its import path, as it was given."""
        self._reward = resolve_reward(reward)
        self._timeout_s = timeout_s
        self.name = getattr(self._reward, "__qualname__", type(self._reward).__qualname__)
        """What messages call it."""
        self.is_called = False
        """Whether the callable holds the event loop, and with it every other response, at this moment."""
        if "response" in columns:
            raise reject("column", "response", "hides the sampled response from the reward", "rename the column")
        try:
            # a torch module's own signature says nothing: it passes everything on
            called = self._reward.forward if isinstance(self._reward, nn.Module) else self._reward
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError) as error:
            raise reject("reward", self.name, "has no signature to inspect", "wrap it in a Python function") from error
        kinds = inspect.Parameter
        self._takes_all = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters)
        named = [
            parameter for parameter in parameters if parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        ]
        self.names = frozenset(parameter.name for parameter in named)
        if not named and not self._takes_all:
            raise reject("reward", self.name, "takes nothing by name", "give it prompt, response or columns")
        known = _BUILT_IN | columns | {"finish_reason"}
        for parameter in named:
            if parameter.kind is kinds.POSITIONAL_ONLY:
                why = f"has the positional-only parameter {parameter.name}"
                raise reject("reward", self.name, why, "let its parameters be passed by name")
            if parameter.default is kinds.empty and parameter.name not in known:
                have = ", ".join(sorted(columns)) or "none"
                why = f"asks for {parameter.name}, which is neither prompt nor response nor a column of every row"
                raise reject("reward", self.name, why, f"name one of the columns ({have}) or give it a default")

    def run_by(self, remote: Callable[..., Any]) -> None:
        """Have the callable run elsewhere from now on.

        Args:
            remote: Takes the same arguments and returns an awaitable. It keeps the deadline itself, from the start of a
                call, so that waiting for a free worker does not count.
        """
        self._reward = remote
        self._timeout_s = math.inf

    async def __call__(self, prompt: Prompt, response_text: str, finish_reason: FinishReason) -> float:
        """Reward one response.

        Raises:
            RewardError: the callable raised, took longer than the deadline, or returned anything but a finite number
                whose square fits into float32; the message names the prompt and the cause is chained.
        """
        arguments = self._arguments(prompt, response_text, finish_reason)
        task = asyncio.current_task()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                self.is_called = True
                try:
                    value = self._reward(**arguments)
                finally:
                    self.is_called = False
                if inspect.isawaitable(value):
                    value = await value
            return _finite(value)
        except asyncio.CancelledError as error:
            # Only a cancellation that somebody asked this task for may pass silently; one that leaks out of the user's
            # code would look like a group that was given up on purpose.
            if task is None or task.cancelling():
                raise
            raise self._error(prompt, "was cancelled from within") from error
        except (Exception, SystemExit) as error:
            if deadline.expired():
                raise self._error(prompt, f"took longer than reward_timeout_s={self._timeout_s:g}") from error
            raise self._error(prompt, f"failed: {type(error).__name__}: {' '.join(str(error).split())}") from error

    def _arguments(self, prompt: Prompt, response_text: str, finish_reason: FinishReason) -> dict[str, Any]:
        given = {"finish_reason": finish_reason} | dict(prompt.columns)
        given |= {"prompt": prompt.text, "response": response_text}
        if self._takes_all:
            hidden = {"finish_reason"} - self.names - set(prompt.columns)
            return {name: value for name, value in given.items() if name not in hidden}
        return {name: value for name, value in given.items() if name in self.names}

    def _error(self, prompt: Prompt, what: str) -> RewardError:
        text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
        return RewardError(f"reward {self.name} {what} (prompt row {prompt.row}, counted from 0: {text!r})")


def _finite(value: Any) -> float:
    number = value
    if getattr(number, "ndim", None) == 0 and hasattr(number, "item"):
        number = number.item()
    if not isinstance(number, numbers.Real):
        raise TypeError(f"it returned {type(value).__name__}, not a finite number")
    result = float(number)
    if not math.isfinite(result):
        raise ValueError(f"it returned {result}, not a finite number")
    if abs(result) > _LARGEST:
        raise ValueError(f"it returned {result:g}, but float32 holds squares of up to {_LARGEST:.1e} only; scale it")
    return result
