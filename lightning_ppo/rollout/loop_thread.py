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
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread unless it runs.

        Raises:
            RolloutError: the thread was closed.
        """
        with self._lock:
            if self._closed:
                raise RolloutError("the rollout collector is closed; build a new one")
            if self._thread.ident is None:
                self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run a coroutine in the loop; starts the thread if need be.

        Raises:
            RolloutError: the thread was closed.
        """
        try:
            self.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise

    def wait(
        self, coroutine: Coroutine[Any, Any, T], what: str, timeout_s: float, check: Callable[[], None], poll_s: float
    ) -> T:
        """Run a coroutine in the loop and wait for its result; whatever ends the wait early cancels it.

        Args:
            coroutine: What to run; its error is raised here.
            what: What it makes, for messages.
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
                    raise RolloutError(
                        f"{what} were not finished within timeout_s={timeout_s:g}; "
                        "look at the engine's log, or set a longer deadline"
                    )
                concurrent.futures.wait([future], min(poll_s, left_s))
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise RolloutError(f"the rollout collector was closed before the {what} were finished") from error
        finally:
            future.cancel()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop's thread soon; without effect once the loop is closed."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel every task and end the thread, waiting `timeout_s` at most; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._thread.ident is None:
                self._loop.close()
                return
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "%s did not end within %g s: a reward function may hang; left behind", self._thread.name, timeout_s
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._on_crash(error)
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                # Less than close() waits, so that a task which ignores its cancellation cannot hold the thread.
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=2.0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            with self._lock:
                self._closed = True
                self._loop.close()
