"""An asyncio event loop in a daemon thread, with a bounded shutdown."""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lightning_ppo.errors import RolloutError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads.

    Args:
        name: Name of the thread.
        on_crash: Called in the thread with whatever broke the loop itself.
    """

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._closed = False
        self._running: tuple[threading.Thread, asyncio.AbstractEventLoop] | None = None

    def start(self) -> None:
        """Start the thread unless it runs.

        Raises:
            RolloutError: the thread was closed.
        """
        with self._lock:
            self._start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run a coroutine in the loop; starts the thread if need be.

        Raises:
            RolloutError: the thread was closed.
        """
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coroutine, self._start())
        except BaseException:
            coroutine.close()
            raise

    def wait(
        self,
        coroutine: Coroutine[Any, Any, T],
        what: str | Callable[[], str],
        timeout_s: float,
        check: Callable[[], None],
        poll_s: float,
    ) -> T:
        """Run a coroutine in the loop and wait for its result; whatever ends the wait early cancels it.

        Args:
            coroutine: What to run; its error is raised here.
            what: What it waits for, for messages; a function is asked when the deadline has passed.
            timeout_s: Deadline.
            check: Called at once and then at least every `poll_s` seconds; what it raises ends the wait.
            poll_s: See `check`.

        Raises:
            RolloutError: the deadline passed, or the thread was closed.
        """
        future = self.submit(coroutine)
        deadline_s = time.monotonic() + timeout_s
        try:
            while not future.done():
                check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    named = what if isinstance(what, str) else what()
                    raise RolloutError(
                        f"{named} were not finished within timeout_s={timeout_s:g}; "
                        "look at the engine's log, or set a longer deadline"
                    )
                concurrent.futures.wait([future], min(poll_s, left_s))
            return future.result()
        except concurrent.futures.CancelledError as error:
            named = what if isinstance(what, str) else what()
            raise RolloutError(f"the rollout collector was closed before {named} were finished") from error
        finally:
            future.cancel()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop's thread soon; without effect unless the thread runs."""
        with self._lock:
            if self._running is not None and not self._closed:
                self._running[1].call_soon_threadsafe(function)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel every task and end the thread, waiting `timeout_s` at most; safe to call twice."""
        with self._lock:
            running = self._running
            if running is not None and not self._closed:
                running[1].call_soon_threadsafe(running[1].stop)
            self._closed = True
        if running is None:
            return
        running[0].join(timeout_s)
        if running[0].is_alive():
            _log.warning("%s did not end within %g s: a reward function may hang; left behind", self._name, timeout_s)

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RolloutError("the rollout collector is closed; build a new one")
        if self._running is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            self._running = thread, loop
            thread.start()
        return self._running[1]

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        except BaseException as error:
            self._on_crash(error)
        finally:
            with self._lock:
                self._closed = True
            try:
                loop.run_until_complete(_cancel_all())
            finally:
                loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        # Less than close() waits, so that a task which ignores its cancellation cannot hold the thread.
        await asyncio.wait(others, timeout=2.0)
