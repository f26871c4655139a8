"""The reward workers: least outstanding first, and a new one for each that dies or hangs."""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lightning_ppo.errors import ConfigError, EngineError
from lightning_ppo.rollout.ray.death import cause_of_death
from lightning_ppo.rollout.ray.resources import check_fits
from lightning_ppo.rollout.ray.reward_worker import Loaded, RewardCode, RewardWorker
from lightning_ppo.rollout.ray.runtime import RayRuntime

_log = logging.getLogger(__name__)

CONCURRENT_CALLS = 1000
"""Calls of an asynchronous function that one worker runs at the same time."""
_LOOK_S = 1.0
"""Time between two looks for workers that hang."""


class Worker:
    """One worker and what it has to do.

    Attributes:
        name: What messages call it.
        actor: Handle of a `RewardWorker`.
        ready: Its `Loaded`, as soon as it runs.
        outstanding: Calls that it has not answered.
        problem: Why it must be replaced.
    """

    def __init__(self, name: str, actor: Any) -> None:
        """Ask it to tell when it runs."""
        self.name = name
        self.actor = actor
        self.ready: Future[Loaded] = actor.ready.remote().future()
        self.outstanding = 0
        self.problem: str | None = None

    def __str__(self) -> str:
        """Return its name, and its process once that is known."""
        if not self.ready.done() or self.ready.exception() is not None:
            return self.name
        loaded = self.ready.result()
        return f"{self.name} (process {loaded.pid} on {loaded.node})"


class RewardPool:
    """A fixed number of workers. Methods may be called from any thread, `acquire` from any event loop.

    Nothing of Ray is called under the lock: Ray may call `release` on the way, in the same thread.
    """

    def __init__(
        self,
        runtime: RayRuntime,
        code: RewardCode,
        num_workers: int,
        *,
        calls_per_worker: int,
        start_timeout_s: float,
        max_replacements: int,
    ) -> None:
        """Start the workers and wait until all have loaded the function.

        Args:
            runtime: Ray, started.
            code: The function.
            num_workers: How many.
            calls_per_worker: Most calls that one works at; more wait here.
            start_timeout_s: How long the workers may take to start.
            max_replacements: Most workers that are replaced; one more is an error of every call.

        Raises:
            ConfigError: the cluster can never hold the workers, or they cannot load the function.
            EngineError: they did not start in time, or died.
        """
        self._need = {"CPU": runtime.config.num_cpus_per_reward_worker}
        instead = "lower it, or lower ray.num_cpus_per_reward_worker"
        check_fits("reward_workers", num_workers, self._need, runtime.nodes(), instead=instead)
        self._runtime = runtime
        self._code = code
        self._calls_per_worker = calls_per_worker
        self._max_replacements = max_replacements
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._calls: dict[Future[Any], tuple[Worker, float]] = {}
        self._ended: str | None = None
        self._stop = threading.Event()
        self.replacements = 0
        self._workers = [self._start(f"reward_worker_{index}") for index in range(num_workers)]
        try:
            self._wait_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._look_after, name="reward-workers", daemon=True).start()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that get calls."""
        with self._lock:
            return tuple(self._workers)

    async def acquire(self) -> Worker:
        """Wait for the worker with the fewest outstanding calls to have room, and count a call there.

        Raises:
            EngineError: there are no workers any more.
        """
        while True:
            self._replace_failed()
            with self._lock:
                if self._ended is not None:
                    raise EngineError(self._ended)
                able = (one for one in self._workers if one.problem is None)
                worker = min(able, key=lambda one: one.outstanding, default=None)
                if worker is not None and worker.outstanding < self._calls_per_worker:
                    worker.outstanding += 1
                    return worker
                loop = asyncio.get_running_loop()
                turn = loop.create_future()
                self._waiting.append((loop, turn))
            try:
                await turn
            except asyncio.CancelledError:
                with self._lock:
                    if (loop, turn) in self._waiting:
                        self._waiting.remove((loop, turn))
                    else:
                        self._wake(1)
                raise

    def watch(self, worker: Worker, call: Future[Any], limit_s: float) -> None:
        """A call has begun. If it goes on for longer than this, even if nobody awaits it, its worker is replaced."""
        with self._lock:
            self._calls[call] = (worker, time.monotonic() + limit_s)
        call.add_done_callback(self._on_end)

    def release(self, worker: Worker) -> None:
        """A call that was counted for this worker has ended, or was not made."""
        with self._lock:
            worker.outstanding -= 1
            self._wake(1)

    def replace(self, worker: Worker, why: str) -> None:
        """End a worker and start another one in its place, unless that was done before."""
        with self._lock:
            worker.problem = worker.problem or why
            if self._ended is not None or worker not in self._workers or not self._runtime.is_running:
                return
            self.replacements += 1
            self._workers.remove(worker)
            is_last = self.replacements > self._max_replacements
            if is_last:
                self._ended = f"{worker} {why}, and {self._max_replacements} reward workers were replaced before"
        self._kill([worker])
        if is_last:
            self.close()
            return
        _log.warning("%s %s; it is replaced (%d of at most %d)", worker, why, self.replacements, self._max_replacements)
        replacement = self._start(worker.name)
        with self._lock:
            is_late = self._ended is not None
            if not is_late:
                self._workers.append(replacement)
                self._wake(len(self._waiting))
        if is_late:
            self._kill([replacement])

    def close(self) -> None:
        """End all workers; calls that wait fail. May be called again."""
        with self._lock:
            self._ended = self._ended or "the reward workers are closed"
            workers, self._workers = self._workers, []
            self._wake(len(self._waiting))
        self._stop.set()
        self._kill(workers)

    def _on_end(self, call: Future[Any]) -> None:
        import ray

        error = call.exception()
        with self._lock:
            worker, _ = self._calls.pop(call)
            if isinstance(error, ray.exceptions.RayActorError):
                # Before the next call gets it.
                worker.problem = worker.problem or f"died: {cause_of_death(error)}"
        self.release(worker)

    def _replace_failed(self) -> None:
        for worker in self.workers:
            if worker.problem is not None:
                self.replace(worker, worker.problem)

    def _look_after(self) -> None:
        while not self._stop.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                hanging = {worker for worker, due in self._calls.values() if due < now}
            for worker in hanging:
                self.replace(worker, "hangs: a call goes on long after its deadline")
            self._replace_failed()

    def _start(self, name: str) -> Worker:
        import ray

        options: dict[str, Any] = {
            "num_cpus": self._need["CPU"],
            "max_restarts": 0,
            "max_concurrency": CONCURRENT_CALLS,
        }
        return Worker(name, ray.remote(RewardWorker).options(**options).remote(self._code))

    def _wait_ready(self, limit_s: float) -> None:
        futures = [worker.ready for worker in self._workers]
        _, late = concurrent.futures.wait(futures, limit_s, concurrent.futures.FIRST_EXCEPTION)
        for worker in self._workers:
            error = worker.ready.exception() if worker.ready.done() else None
            if error is not None:
                raise EngineError(f"{worker} died before it was ready: {cause_of_death(error)}") from error
        if late:
            free = self._runtime.describe_free(self._need)
            raise EngineError(
                f"reward_workers={len(futures)} did not start within {limit_s:g} s: {len(late)} are not ready"
                f" (free: {free}); lower it, or free some"
            )
        for worker in self._workers:
            failure = worker.ready.result().failure
            if failure is not None:
                text = failure.text if failure.kind == "ConfigError" else f"{failure.kind}: {failure.text}"
                why = f"cannot load the reward function: {' '.join(text.split())}"
                raise ConfigError(f"{worker} {why}; make it importable on every node") from failure.rebuild()

    def _kill(self, workers: Sequence[Worker]) -> None:
        import ray

        if self._runtime.is_running:
            for worker in workers:
                ray.kill(worker.actor)

    def _wake(self, count: int) -> None:
        """Let `count` waiting calls look again. Called under the lock."""
        while count > 0 and self._waiting:
            loop, turn = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_finish, turn)
            except RuntimeError:
                # Its event loop is closed; nobody waits there any more.
                continue
            count -= 1


def _finish(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
