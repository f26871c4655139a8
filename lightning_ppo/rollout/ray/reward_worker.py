"""What runs in a reward worker's process, and what travels between it and the trainer."""

import asyncio
import importlib
import inspect
import numbers
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_ppo.imports import import_object


def is_asynchronous(reward: Callable[..., Any]) -> bool:
    """Whether calls of a reward function run at the same time: it is a coroutine function, or its `__call__` is."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


@dataclass(frozen=True)
class RewardCode:
    """How a worker gets the function.

    Attributes:
        pickled: The function; None if `path` is given.
        path: Its import path.
        search_path: The trainer's `sys.path`; what the worker's lacks is appended there.
    """

    pickled: bytes | None
    path: str | None
    search_path: tuple[str, ...]

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        sys.path.extend(entry for entry in self.search_path if entry not in sys.path)
        if self.path is not None:
            return import_object("reward", self.path)
        return pickle.loads(self.pickled or b"")


@dataclass(frozen=True)
class Failure:
    """An error of the user's function. `pickled` is None where it cannot be pickled."""

    kind: str
    text: str
    pickled: bytes | None
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an error."""
        cloudpickle: Any = importlib.import_module("ray.cloudpickle")
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            # Whatever an error may hold, it must not hide the error.
            pickled = None
        return cls(type(error).__name__, str(error), pickled, "".join(traceback.format_exception(error)))

    def rebuild(self) -> BaseException:
        """The error again, of its own class where that is known here, with its traceback as its cause."""
        error: Any = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                # Its class is not importable here, or cannot be built again.
                error = None
        if not isinstance(error, BaseException):
            error = type(self.kind, (Exception,), {})(self.text)
        error.__cause__ = RemoteTracebackError(self.trace)
        return error


class RemoteTracebackError(Exception):
    """Where a reward function failed in its worker; the cause of the error that it raised."""

    def __str__(self) -> str:
        """Return the traceback on lines of its own."""
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Loaded:
    """A worker that is ready, or why it cannot be (`failure`)."""

    pid: int
    node: str
    failure: Failure | None


class RewardWorker:
    """Calls the reward function: all calls at once if it is asynchronous, else one at a time in a thread."""

    def __init__(self, code: RewardCode) -> None:
        """Load the function."""
        self._failure: Failure | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        try:
            self._reward = code.load()
            self._is_asynchronous = is_asynchronous(self._reward)
        except (Exception, SystemExit) as error:
            self._failure = Failure.of(error)

    async def ready(self) -> Loaded:
        """Tell that the worker runs."""
        import ray

        util: Any = ray.util
        return Loaded(os.getpid(), util.get_node_ip_address(), self._failure)

    async def call(self, arguments: dict[str, Any]) -> float | Failure:
        """Call the function with these arguments, by name."""
        task = asyncio.current_task()
        try:
            if self._is_asynchronous:
                value = self._reward(**arguments)
            else:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(self._thread, lambda: self._reward(**arguments))
            if inspect.isawaitable(value):
                value = await value
            return _plain(value)
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            return Failure.of(error)
        except (Exception, SystemExit) as error:
            return Failure.of(error)


def _plain(value: Any) -> Any:
    """The number in a value, so that the trainer need not know its class."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {type(value).__name__}, not a finite number")
    return float(value)
