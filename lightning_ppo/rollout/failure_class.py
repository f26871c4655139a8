"""Why a rollout failed: infrastructure, data, or something that ends the run."""

import errno
import socket
from enum import StrEnum

from lightning_ppo.errors import CheckpointError, ConfigError, DataError, EngineDiedError, EngineError, RolloutError

MAX_CAUSES = 8
"""Causes behind an error that `classify` looks at."""

_FATAL = (EngineDiedError, CheckpointError, ConfigError, RolloutError, MemoryError)
_INFRA = (TimeoutError, ConnectionError, EngineError, socket.gaierror, socket.herror)
_NETWORK = frozenset(
    getattr(errno, f"E{name}")
    for name in ("ADDRNOTAVAIL", "HOSTDOWN", "HOSTUNREACH", "NETDOWN", "NETRESET", "NETUNREACH", "NOBUFS", "NOTCONN")
)
"""Error numbers of a plain OSError; for the others Python has ConnectionError and TimeoutError."""
_FOREIGN_INFRA = {
    "aiohttp": frozenset({"ClientError"}),
    "httpx": frozenset({"NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"}),
    "ray": frozenset(
        f"{name}Error"
        for name in (
            *("GetTimeout", "LocalRayletDied", "NodeDied", "ObjectLost", "OutOfMemory"),
            *("RayActor", "RaySystem", "Rpc", "WorkerCrashed"),
        )
    ),
}
"""Base classes by package: none of these packages is imported for it."""


class FailureClass(StrEnum):
    """Why a rollout failed, which decides what happens next."""

    INFRA = "infra"
    """Something between us and the response; the same request may well succeed later or elsewhere."""
    DATA = "data"
    """The prompt, its response or the reward; another attempt is cheap but rarely helps."""
    FATAL = "fatal"
    """The run cannot go on, whatever the budgets say."""


def classify(error: BaseException) -> FailureClass:
    """Say why a rollout failed.

    In this order:

    1. FATAL is decided by the error itself, never by its causes: `EngineDiedError`, `CheckpointError`, `ConfigError`,
       `RolloutError`, `MemoryError`, and whatever is no `Exception` (`KeyboardInterrupt`, `SystemExit`, ...). As the
       cause of another error they were handled: somebody chose to raise something else.
    2. From the error inward through at most `MAX_CAUSES` causes, the first that tells decides. A cause is what
       `raise ... from` names, else what was being handled, else the first of an exception group or what Ray carried
       over from another process. What tells:

       * `DataError`: DATA, so that a failure called one of the data stays one, whatever caused it;
       * an HTTP status (`status`, `status_code`, also of `response`): 408, 429 and 5xx are INFRA, any other 4xx is
         DATA, because the same request will be refused again;
       * INFRA: timeouts, lost and refused connections, failed name look-ups, an unreachable network, `EngineError`,
         errors of aiohttp's and httpx's clients, and Ray's about an actor, worker, node or object that is gone.
    3. Otherwise DATA. A `RewardError` says nothing itself: a reward server that hangs or refuses is INFRA through its
       cause, a reward that raises `ValueError` over a response is DATA.
    """
    if isinstance(error, _FATAL) or not isinstance(error, Exception):
        return FailureClass.FATAL
    link: BaseException | None = error
    for _ in range(MAX_CAUSES + 1):
        if link is None:
            break
        found = _tells(link)
        if found is not None:
            return found
        link = _cause(link)
    return FailureClass.DATA


def _tells(error: BaseException) -> FailureClass | None:
    if isinstance(error, DataError):
        return FailureClass.DATA
    status = _status(error)
    if status is not None and 400 <= status <= 599:
        return FailureClass.INFRA if status >= 500 or status in (408, 429) else FailureClass.DATA
    if isinstance(error, _INFRA) or (isinstance(error, OSError) and error.errno in _NETWORK):
        return FailureClass.INFRA
    for base in type(error).__mro__:
        if base.__name__ in _FOREIGN_INFRA.get(base.__module__.partition(".")[0], ()):
            return FailureClass.INFRA
    return None


def _status(error: BaseException) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code"):
            status = getattr(holder, name, None)
            if isinstance(status, int):
                return status
    return None


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    if error.__context__ is not None and not error.__suppress_context__:
        return error.__context__
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    carried = getattr(error, "cause", None)
    return carried if isinstance(carried, BaseException) else None
