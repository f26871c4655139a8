"""What a failed rollout costs: classes of errors, attempts with back-off, budgets of dropped prompts."""

import errno
import logging
import math
import socket
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from lightning_ppo.batch import FailureCounts
from lightning_ppo.errors import CheckpointError, ConfigError, DataError, EngineDiedError, EngineError, RolloutError
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.validation import require

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Retry:
    """Sample the response again."""

    delay_s: float
    """Seconds to wait before."""


@dataclass(frozen=True)
class Drop:
    """Give the prompt up, and go on without it."""

    reason: str
    """One line."""


class FailureBudget:
    """Counts failures, and decides after each: another attempt, a dropped prompt, or the end of the run.

    Attempts are counted per response and class; siblings that fail together in one outage are one attempt at their
    prompt, not many. A prompt is used up with the first response that is. Runs in the collector's event loop;
    `state_dict` may be called from any thread.

    Args:
        config: Attempts, back-off and drop budgets.
    """

    def __init__(self, config: FailureConfig) -> None:
        self._config = config
        self._attempts: dict[int, dict[tuple[int, FailureClass], int]] = {}
        self._consecutive = 0
        self.dropped = {FailureClass.DATA: 0, FailureClass.INFRA: 0}
        """Prompts dropped so far, before a restart included."""
        self.retries = 0
        """Attempts granted so far, since the process started."""

    @property
    def counts(self) -> FailureCounts:
        """Retries and drops so far."""
        return FailureCounts(self.retries, sum(self.dropped.values()))

    def decide(self, draw: int, error: BaseException, index: int = 0) -> Retry | Drop:
        """Decide what follows a failed attempt.

        Args:
            draw: Draw of the prompt.
            error: What the attempt raised.
            index: Number of the response within its group.

        Returns:
            `Retry` after min(backoff_s * 2**(k-1), max_backoff_s) seconds for the k-th failure of its class, or `Drop`,
            which the budget has paid for.

        Raises:
            BaseException: `error` itself, with a note, when it is FATAL, or attempts and drop budget are used up.
        """
        kind = classify(error)
        if kind is FailureClass.FATAL:
            _end(draw, index, error, "is fatal and never tried again")
        config = self._config
        counts = self._attempts.setdefault(draw, {})
        failed = counts[index, kind] = counts.get((index, kind), 0) + 1
        allowed = config.max_infra_attempts if kind is FailureClass.INFRA else config.max_data_attempts
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if failed < allowed:
            delay_s = min(config.backoff_s * 2.0 ** min(failed - 1, 1000), config.max_backoff_s)
            self.retries += 1
            _log.info("draw %d, response %d: attempt again in %g s after %s", draw, index, delay_s, what)
            return Retry(delay_s)
        tried = f"used up failures.max_{kind}_attempts={allowed}"
        if config.drop == "fail":
            _end(draw, index, error, f"{tried}, and failures.drop=fail ends the run")
        if kind is FailureClass.INFRA:
            name, left = "max_consecutive_dropped_prompts", config.max_consecutive_dropped_prompts - self._consecutive
        else:
            name, left = "max_dropped_prompts", config.max_dropped_prompts - self.dropped[kind]
        if left <= 0:
            _end(draw, index, error, f"{tried}, and failures.{name}={getattr(config, name)} is used up as well")
        self._consecutive += kind is FailureClass.INFRA
        self.dropped[kind] += 1
        del self._attempts[draw]
        _log.warning("draw %d is dropped: response %d %s, last with %s", draw, index, tried, what)
        return Drop(f"{kind}: {tried}, last with {what}")

    def committed(self, draw: int) -> None:
        """Forget the failures of a draw whose group is complete; drops for infrastructure are in a row no more."""
        self._attempts.pop(draw, None)
        self._consecutive = 0

    def state_dict(self) -> dict[str, int]:
        """Return what was dropped. Attempts are not kept: a restarted run tries every prompt afresh."""
        state = {f"dropped_{kind}": count for kind, count in self.dropped.items()}
        return state | {"consecutive_dropped": self._consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where a saved run stopped.

        Raises:
            CheckpointError: the state is not what `state_dict` returns; nothing was loaded.
        """
        wanted = self.state_dict().keys()
        if state.keys() != wanted or not all(type(count) is int and count >= 0 for count in state.values()):
            raise CheckpointError(f"the checkpoint's dropped prompts are {state}, not counts of {', '.join(wanted)}")
        self.dropped = {kind: state[f"dropped_{kind}"] for kind in self.dropped}
        self._consecutive = state["consecutive_dropped"]


def check_drops(
    config: FailureConfig,
    *,
    samplers_stamp: bool,
    align: int,
    groups_per_step: int,
    generations: int,
    row_multiple: int | None = None,
) -> None:
    """Check that steps may get shorter, where `failures.drop=skip` makes them.

    Dropped prompts leave any number of groups, so that every number must divide over ranks and micro-batches: align 1,
    which holds exactly if the row multiple m divides G. The smallest such G' >= G is ceil(G / m) * m. G and align do
    not determine m (G=6 and align=2 come from m=4 and from m=12), but it always divides G * align.

    Args:
        config: What is checked.
        samplers_stamp: Whether the sampler gives every group a target step; else no step can know that it lost one.
        align: See `group_alignment`.
        groups_per_step: P.
        generations: G, rows per group.
        row_multiple: m, `group_alignment(generations=1, ...)`; without it the message names G * align.

    Raises:
        ConfigError: `drop=skip` with a sampler that stamps no targets, with one group per step, or with align > 1.
        ValueError: `row_multiple` and `align` contradict each other.
    """
    if row_multiple is not None and row_multiple // math.gcd(row_multiple, generations) != align:
        raise ValueError(f"row_multiple={row_multiple} and generations={generations} do not give align={align}")
    if config.drop != "skip":
        return
    instead = "set failures.drop=replace"
    why = "needs a sampler that gives every group its step"
    require(samplers_stamp, "failures.drop", "skip", why, f"set sampler=in_order, or {instead}")
    require(groups_per_step > 1, "failures.drop", "skip", "leaves nothing of a step of one group", instead)
    multiple = generations * align if row_multiple is None else row_multiple
    enough = -(-generations // multiple) * multiple
    why = f"leaves steps that do not divide over ranks and micro-batches, which share multiples of {align} groups"
    require(align == 1, "failures.drop", "skip", why, f"set num_generations_per_prompt={enough}, or {instead}")


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


def _end(draw: int, index: int, error: BaseException, why: str) -> NoReturn:
    start = "rollout of draw "
    # A dead engine fails every group with the same object; the first one to see it says enough.
    if not any(note.startswith(start) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{start}{draw}, response {index}: this {why}")
    raise error
