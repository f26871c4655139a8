"""The trainer's end of the line to the engine's process: two threads, futures, and the notice of its death."""

import asyncio
import itertools
import queue
import socket
import threading
from collections import defaultdict

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest
from lightning_ppo.rollout.local.process import WorkerProcess
from lightning_ppo.rollout.local.protocol import (
    Abort,
    Command,
    Done,
    Finished,
    Ready,
    Refused,
    Reply,
    Submit,
    Unserved,
)

_LIVENESS_S = 0.25
_JOIN_S = 5.0

_Future = asyncio.Future[Generation]
_Outcomes = dict[asyncio.AbstractEventLoop, list[tuple[_Future, Generation | Exception]]]


class Channel:
    """Sends commands, receives replies, and resolves futures; owns the process it talks to."""

    def __init__(self, process: WorkerProcess) -> None:
        """Start the two threads."""
        self._process = process
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Ready | Done | Refused | EngineDiedError] = queue.SimpleQueue()
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[asyncio.AbstractEventLoop, _Future, str]] = {}
        self._end: str | None = None
        self._threads = (
            threading.Thread(target=self._send, name="local-engine-send", daemon=True),
            threading.Thread(target=self._receive, name="local-engine-receive", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def generate(self, request: GenerationRequest) -> Generation:
        """Send a request and wait for its response; cancelling the awaiting task aborts it.

        Raises:
            EngineError: the engine is asleep.
            EngineDiedError: the process is gone.
        """
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        key = next(self._keys)
        with self._lock:
            self._raise_if_ended()
            self._pending[key] = (loop, future, request.request_id)
        self._outbox.put(Submit(key, request))
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                known = self._pending.pop(key, None)
            if known is not None:
                self._outbox.put(Abort(key))
            raise

    def ask(self, command: Command, field: str, limit_s: float, what: str, fd: int | None = None) -> Ready | Done:
        """Send a command (and first a file descriptor) and block until it is answered.

        Raises:
            EngineError: the engine refused, or did not answer within `limit_s`; after the latter the channel is closed,
                because nobody knows what the engine is doing.
            EngineDiedError: the process is gone.
        """
        if fd is not None:
            socket.send_fds(self._process.files, [b"f"], [fd])
        self._outbox.put(command)
        try:
            reply = self._replies.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise EngineError(f"{field}={limit_s:g} ran out before the local engine could {what}; raise it") from None
        if isinstance(reply, EngineDiedError):
            raise reply
        if isinstance(reply, Refused):
            raise EngineError(reply.reason)
        return reply

    def check_health(self) -> None:
        """Return if the process is alive.

        Raises:
            EngineDiedError: it is not; the message ends with the last lines of its log.
        """
        if self._end is None and not self._process.is_alive():
            self._fail(self._process.describe_end())
        self._raise_if_ended()

    def close(self) -> None:
        """Stop the process and fail what is pending; safe to call twice and after a failure."""
        self._fail(f"local engine (pid {self.pid}) is closed")
        self._process.stop()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._process.close()

    def _send(self) -> None:
        while (command := self._outbox.get()) is not None:
            batch = [command]
            while not self._outbox.empty():
                following = self._outbox.get()
                if following is None:
                    return
                batch.append(following)
            try:
                self._process.commands.send(batch)
            except OSError:
                # The receiving thread sees the same end and reports it.
                return

    def _receive(self) -> None:
        commands = self._process.commands
        try:
            while True:
                if commands.poll(_LIVENESS_S):
                    reply: Reply = commands.recv()
                    if isinstance(reply, Finished):
                        self._deliver(reply)
                    elif isinstance(reply, Unserved):
                        self._refuse(reply)
                    else:
                        self._replies.put(reply)
                elif not self._process.is_alive():
                    break
        except (EOFError, OSError):
            pass
        self._fail(self._process.describe_end())

    def _deliver(self, finished: Finished) -> None:
        outcomes: _Outcomes = defaultdict(list)
        tokens, logprobs = finished.token_ids.tolist(), finished.logprobs.tolist()
        versions, start = finished.versions.tolist(), 0
        for key, length, stopped in zip(finished.keys, finished.lengths, finished.stopped, strict=True):
            part = slice(start, start + length)
            start += length
            with self._lock:
                entry = self._pending.pop(key, None)
            if entry is None:
                continue
            loop, future, request_id = entry
            generation = Generation(
                request_id=request_id,
                token_ids=tuple(tokens[part]),
                logprobs=tuple(logprobs[part]),
                finish_reason="stop" if stopped else "length",
                policy_versions=tuple(versions[part]),
            )
            outcomes[loop].append((future, generation))
        _hand_over(outcomes)

    def _refuse(self, unserved: Unserved) -> None:
        with self._lock:
            entry = self._pending.pop(unserved.key, None)
        if entry is not None:
            _hand_over({entry[0]: [(entry[1], EngineError(unserved.reason))]})

    def _fail(self, end: str) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = end
            pending = list(self._pending.values())
            self._pending.clear()
        self._replies.put(EngineDiedError(end))
        outcomes: _Outcomes = defaultdict(list)
        for loop, future, _ in pending:
            outcomes[loop].append((future, EngineDiedError(end)))
        _hand_over(outcomes)

    def _raise_if_ended(self) -> None:
        if self._end is not None:
            raise EngineDiedError(self._end)


def _hand_over(outcomes: _Outcomes) -> None:
    for loop, pairs in outcomes.items():
        try:
            loop.call_soon_threadsafe(_resolve, pairs)
        except RuntimeError:
            # The loop is closed: nobody awaits these futures any more.
            continue


def _resolve(pairs: list[tuple[_Future, Generation | Exception]]) -> None:
    for future, outcome in pairs:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
