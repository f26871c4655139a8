"""One server in a Ray actor, as the trainer sees it."""

import logging
import threading
from pathlib import Path
from typing import Any

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.ray.death import cause_of_death
from lightning_ppo.rollout.ray.resources import Resources, describe
from lightning_ppo.rollout.ray.runtime import RayRuntime
from lightning_ppo.rollout.ray.server_host import End, Started

_log = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""Deadline of a question to an actor that runs."""
_STOP_S = 20.0
"""Deadline of a stop in the actor: the guard's grace and patience are below it."""


class RayServer:
    """See `lightning_ppo.rollout.vllm.launch.Server`. It is dead when the server or its actor is.

    Attributes:
        name: What messages call it.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        runtime: RayRuntime,
        start_timeout_s: float,
        need: Resources,
        log_path: Path | None,
    ) -> None:
        """Ask the actor to tell when it runs, and when the server has ended.

        Args:
            name: What messages call it.
            actor: Handle of a `ServerHost`.
            runtime: Ray.
            start_timeout_s: How long Ray may take to place the actor.
            need: What the actor reserves.
            log_path: Log of the server on its node, if it has a name.
        """
        self.name = name
        self._actor = actor
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._need = need
        self._log_path = log_path
        self._started = actor.started.remote()
        self._ended = actor.wait_end.remote()
        self._lock = threading.Lock()
        self._end: End | None = None
        self._is_stopped = False

    @property
    def url(self) -> str:
        """Where it answers, or will; waits until Ray has placed the actor.

        Raises:
            EngineError: Ray has not within `start_timeout_s`, the actor ended, or the server could not be started.
        """
        return self._wait_started().url

    @property
    def actor_pid(self) -> int:
        """Process id of the actor, on its node; waits like `url`.

        Raises:
            EngineError: see `url`.
        """
        return self._wait_started().actor_pid

    @property
    def pid(self) -> int:
        """Process id of the server, on its node; waits like `url`.

        Raises:
            EngineError: see `url`, or the actor does not answer.
        """
        self._wait_started()
        answer = self._ask("pid")
        if answer is None:
            raise EngineDiedError(f"vLLM {self.name}: its Ray actor does not answer: {self.describe_end()}")
        return answer

    def is_alive(self) -> bool:
        """Whether the server and its actor live; asks nobody, for Ray has told already."""
        return self._end is None and self._runtime.is_running and not _is_ready(self._ended)

    def port_taken(self) -> bool:
        """Whether it ended because somebody else had its port."""
        return not self.is_alive() and self._read_end().port_taken

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of its log; after its end at most 50, and none if its actor died."""
        if not self.is_alive():
            return list(self._read_end().tail[-lines:])
        if not _is_ready(self._started):
            return []
        return self._ask("log_tail", lines) or []

    def describe_end(self) -> str:
        """One line: how it ended, why if its log says so, and the last lines of its log."""
        if not self.is_alive():
            return self._read_end().description
        if not _is_ready(self._started):
            free = self._runtime.describe_free(self._need)
            return f"waits for Ray to place it (needs {describe(self._need)}; free: {free})"
        return self._ask("describe") or f"has a Ray actor that does not answer within {_ANSWER_S:g} s"

    def stop(self, *, kill: bool = False) -> None:
        """End the server and everything it started, then its actor; may be called again."""
        import ray

        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            if not self._runtime.is_running:
                return
            if self.is_alive() and _is_ready(self._started):
                self._ask("stop", kill, limit_s=_STOP_S)
                # What it has to say about its end goes with the actor.
                ray.wait([self._ended], timeout=_ANSWER_S)
            if not self.is_alive():
                self._read_end()
            # If the actor did not do it, the guard does when it is gone.
            ray.kill(self._actor)
            if self._end is None:
                self._end = End(False, "was stopped", ())

    def close(self) -> None:
        """Stop it and let go of everything; may be called again."""
        self.stop()

    def _wait_started(self) -> Started:
        import ray

        try:
            started: Started = ray.get(self._started, timeout=self._start_timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"vllm.start_timeout_s={self._start_timeout_s:g} ran out: vLLM {self.name} {self.describe_end()};"
                " free some, or ask for less"
            ) from error
        except ray.exceptions.RayError as error:
            raise EngineDiedError(f"vLLM {self.name} {_describe_lost(error, None)}") from error
        if started.problem is not None:
            raise EngineError(f"vLLM {self.name} {started.problem}")
        return started

    def _ask(self, method: str, *arguments: Any, limit_s: float = _ANSWER_S) -> Any:
        """The actor's answer; None if there is none."""
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            _log.debug("vLLM %s: no answer to %s: %s", self.name, method, error)
            return None

    def _read_end(self) -> End:
        import ray

        if self._end is None:
            if not self._runtime.is_running:
                self._end = End(False, "ended with Ray, which is shut down", ())
                return self._end
            try:
                self._end = ray.get(self._ended, timeout=_ANSWER_S)
            except ray.exceptions.RayError as error:
                self._end = End(False, _describe_lost(error, self._log_path), ())
        return self._end


def _is_ready(reference: Any) -> bool:
    import ray

    return bool(ray.wait([reference], timeout=0)[0])


def _describe_lost(error: BaseException, log_path: Path | None) -> str:
    where = "its log went with it" if log_path is None else f"its log is {log_path}"
    return f"lost its Ray actor ({cause_of_death(error)}); {where}"
