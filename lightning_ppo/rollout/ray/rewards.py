"""The user's reward function in Ray actors, called like the function itself."""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.ray.death import cause_of_death
from lightning_ppo.rollout.ray.reward_pool import CONCURRENT_CALLS, RewardPool, Worker
from lightning_ppo.rollout.ray.reward_worker import Failure, RewardCode, is_asynchronous
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.reward import resolve_reward
from lightning_ppo.validation import check_count, reject

_ATTEMPTS = 3
"""Workers that may die under a call."""
_GRACE_S = 5.0
"""How long a call may go on after its deadline before its worker counts as hanging."""


class RemoteReward:
    """A reward function whose calls are awaited, and run in `num_workers` processes.

    It has the function's own signature and name, so that `RewardFunction(RemoteReward(...), columns, timeout_s)` treats
    it like the function. A synchronous function runs once at a time in each worker, and more calls wait here; an
    asynchronous one runs up to 1000 times at once.

    A call that is still running after `timeout_s`, counted from its start and without its wait for a worker, ends in
    `TimeoutError`; if it goes on for 5 s more, its worker is replaced. So is a worker that dies. Calls that a worker
    took with it are made again by another one, unless it was the third. Cancelling the awaiting task cancels an
    asynchronous call in its worker; a synchronous one that has begun cannot be interrupted, and keeps its deadline.
    """

    def __init__(
        self,
        runtime: RayRuntime,
        reward: Callable[..., Any] | str,
        num_workers: int,
        timeout_s: float,
        *,
        start_timeout_s: float = 120.0,
        max_replacements: int = 20,
    ) -> None:
        """Start the workers and wait until all have loaded the function.

        Args:
            runtime: Ray, started. It is not closed here.
            reward: A callable, which is pickled; or an import path, which each worker imports itself.
            num_workers: How many processes.
            timeout_s: Deadline of one call.
            start_timeout_s: How long the workers may take to start.
            max_replacements: Most workers that are replaced over the whole run.

        Raises:
            ConfigError: the path does not lead to a callable, the callable has no signature, cannot be pickled or
                cannot be loaded in a worker, or the cluster cannot hold the workers.
            EngineError: the workers did not start in time, or died.
        """
        check_count("reward_workers", num_workers)
        function = resolve_reward(reward)
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            self.__signature__ = inspect.signature(function)
        except (TypeError, ValueError) as error:
            why, instead = "has no signature to inspect", "wrap it in a Python function"
            raise reject("reward", self.__qualname__, why, instead) from error
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._is_asynchronous = is_asynchronous(function)
        self._pool = RewardPool(
            runtime,
            _code(reward, self.__qualname__),
            num_workers,
            calls_per_worker=CONCURRENT_CALLS if self._is_asynchronous else 1,
            start_timeout_s=start_timeout_s,
            max_replacements=max_replacements,
        )

    @property
    def replacements(self) -> int:
        """Workers that were replaced so far."""
        return self._pool.replacements

    def __call__(self, **arguments: Any) -> Coroutine[Any, Any, float]:
        """Call the function in a worker; to be awaited.

        Raises:
            TimeoutError: it took longer than `timeout_s`.
            EngineError: three workers died under the call, or too many died altogether.
            BaseException: whatever the function raised, of the same class where that can be pickled.
        """
        return self._call(arguments)

    def close(self) -> None:
        """End the workers; calls that wait fail. May be called again."""
        self._pool.close()

    async def _call(self, arguments: dict[str, Any]) -> float:
        import ray

        deaths = 0
        while True:
            worker = await self._acquire()
            try:
                reference = worker.actor.call.remote(arguments)
            except BaseException:
                # The arguments cannot be pickled.
                self._pool.release(worker)
                raise
            running: Future[Any] = reference.future()
            self._pool.watch(worker, running, self._timeout_s + _GRACE_S)
            try:
                answer = await self._wait(reference, running)
            except ray.exceptions.RayActorError as error:
                self._pool.replace(worker, f"died: {cause_of_death(error)}")
                deaths += 1
                if deaths == _ATTEMPTS:
                    raise EngineError(f"its worker died {_ATTEMPTS} times ({worker} {worker.problem})") from error
                continue
            except ray.exceptions.RayTaskError as error:
                # Outside of the function, for example when the worker unpickled the arguments.
                raise error.cause from error
            if isinstance(answer, Failure):
                raise answer.rebuild()
            return answer

    async def _acquire(self) -> Worker:
        """A worker that is ready, with a call counted there."""
        while True:
            worker = await self._pool.acquire()
            if worker.ready.done() and worker.ready.exception() is None:
                return worker
            is_ready = False
            try:
                # Only a replacement is not ready yet. Its start has no share in the deadline.
                done, _ = await asyncio.wait([_observed(worker.ready)], timeout=self._start_timeout_s)
                if not done:
                    self._pool.replace(worker, f"did not start within {self._start_timeout_s:g} s")
                elif (error := worker.ready.exception()) is not None:
                    self._pool.replace(worker, f"died before it was ready: {cause_of_death(error)}")
                elif (failure := worker.ready.result().failure) is not None:
                    raise failure.rebuild()
                else:
                    is_ready = True
                    return worker
            finally:
                if not is_ready:
                    self._pool.release(worker)

    async def _wait(self, reference: Any, running: Future[Any]) -> Any:
        import ray

        future = _observed(running)
        try:
            done, _ = await asyncio.wait([future], timeout=self._timeout_s)
            if done:
                return future.result()
            raise TimeoutError(f"took longer than reward_timeout_s={self._timeout_s:g}")
        finally:
            if self._is_asynchronous and not running.done():
                ray.cancel(reference)


def _observed(future: Future[Any]) -> asyncio.Future[Any]:
    """The future of this event loop for a future of Ray; its error is nobody's loss if nobody waits any more."""
    observed = asyncio.wrap_future(future)
    observed.add_done_callback(lambda done: done.cancelled() or done.exception())
    return observed


def _code(reward: Callable[..., Any] | str, name: str) -> RewardCode:
    search_path = tuple(sys.path)
    if isinstance(reward, str):
        where, _, function = reward.rpartition(":")
        path = f"{Path(where).resolve()}:{function}" if where.endswith(".py") else reward
        return RewardCode(None, path, search_path)
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    try:
        return RewardCode(cloudpickle.dumps(reward), None, search_path)
    except Exception as error:
        why = f"cannot be sent to reward workers ({type(error).__name__}: {' '.join(str(error).split())})"
        instead = "let it make such objects itself, or set reward_workers=0"
        raise reject("reward", name, why, instead) from error
