"""What brings buckets of weights to servers, and what every way of doing so shares."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.host_weights import HostWeights

_PATIENCE_S = 5.0


class Receiver(Protocol):
    """A server as transports see it. Errors are EngineErrors that name it."""

    name: str

    def world_size(self, timeout_s: float) -> int:
        """Workers of the server."""
        ...

    def connect(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Make the workers ready for a transport."""
        ...

    def update(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Load one bucket; blocks until it is loaded."""
        ...


class WeightTransport(Protocol):
    """One way to bring weights to servers."""

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """Make every receiver load every bucket. Each has begun an update, and completes it afterwards.

        Args:
            weights: The host copy that the buckets are part of.
            buckets: Taken one by one; a bucket is complete in the host copy when it is taken, and stays unchanged
                until the update ends.
            receivers: The servers. One that fails gets no more, and does not hold up the others.
            deadline: On the clock of `time.monotonic`.

        Returns:
            What went wrong, by the receiver's name; empty if all is well.

        Raises:
            EngineError: the transport cannot work at all; or taking a bucket failed. No receiver is complete then.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind; safe to call twice."""
        ...


class Named(Protocol):
    """Something with a name that no other one has."""

    name: str


N = TypeVar("N", bound=Named)


class Lanes(Generic[N]):
    """One thread per receiver, which does its jobs in order; the sender prepares the next bucket meanwhile.

    Attributes:
        failures: The first error of each receiver, by name; it does no jobs after that.
    """

    def __init__(self, receivers: Sequence[N]) -> None:
        """Start the threads."""
        self.failures: dict[str, EngineError] = {}
        self._broken: list[BaseException] = []
        self._left = [0] * len(receivers)
        self._changed = threading.Condition()
        self._queues: list[queue.SimpleQueue[Callable[[N], None] | None]] = []
        self._threads: list[threading.Thread] = []
        for lane, receiver in enumerate(receivers):
            jobs: queue.SimpleQueue[Callable[[N], None] | None] = queue.SimpleQueue()
            name = f"refit-{receiver.name}"
            thread = threading.Thread(target=self._work, args=(lane, receiver, jobs), name=name, daemon=True)
            self._queues.append(jobs)
            self._threads.append(thread)
            thread.start()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all jobs, each of which has its deadline.

        Raises:
            BaseException: a job raised something else than an EngineError.
        """
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._broken and error is None:
            raise self._broken[0]

    def submit(self, job: Callable[[N], None]) -> None:
        """Do this for every receiver that has not failed yet."""
        with self._changed:
            self._left = [count + 1 for count in self._left]
        for jobs in self._queues:
            jobs.put(job)

    def settle(self, most: int) -> None:
        """Wait until no receiver has more than `most` jobs left, each of which has its deadline.

        A job that is done is not referred to any more, nor is what it holds.
        """
        with self._changed:
            self._changed.wait_for(lambda: all(count <= most for count in self._left))

    def _work(self, lane: int, receiver: N, jobs: "queue.SimpleQueue[Callable[[N], None] | None]") -> None:
        broken = False
        while (job := jobs.get()) is not None:
            if not broken and receiver.name not in self.failures:
                try:
                    job(receiver)
                except EngineError as error:
                    self.failures[receiver.name] = _without_frames(error)
                except BaseException as error:
                    broken = True
                    self._broken.append(error)
            job = None
            with self._changed:
                self._left[lane] -= 1
                self._changed.notify_all()


def _without_frames(error: EngineError) -> EngineError:
    """The error alone: the frames that it came through refer to the bucket that was being sent."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def loading(message: Mapping[str, Any], deadline: float) -> Callable[[Receiver], None]:
    """Job of a lane: make its receiver load the bucket that this message describes."""

    def load(receiver: Receiver) -> None:
        receiver.update(message, remaining(deadline))

    return load


def run_together(first: Callable[[], None], second: Callable[[], None], deadline: float) -> None:
    """Run two calls that wait for each other. The first error of either ends the wait; the other call is left behind.

    Args:
        first: One of them.
        second: The other.
        deadline: Of both, on the clock of `time.monotonic`; they have some seconds more to say so themselves.

    Raises:
        EngineError: one of them did not end.
        BaseException: what the first of them to fail raised.
    """
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            results.put(error)
        else:
            results.put(None)

    threads = [threading.Thread(target=run, args=(call,), name="refit-call", daemon=True) for call in (first, second)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        try:
            error = results.get(timeout=remaining(deadline) + _PATIENCE_S)
        except queue.Empty:
            raise EngineError(
                "transfer=1 call hangs beyond its deadline; look at the other side's log, or raise"
                " vllm.update_timeout_s"
            ) from None
        if error is not None:
            raise error
    # which are about to end; with them goes what the calls held
    for thread in threads:
        thread.join()


def remaining(deadline: float) -> float:
    """Seconds until `deadline` on the clock of `time.monotonic`; never negative."""
    return max(0.0, deadline - time.monotonic())
