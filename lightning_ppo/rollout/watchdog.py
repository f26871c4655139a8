"""Notices that nothing gets on any more."""

import logging
import math
import time
from collections.abc import Callable

from lightning_ppo.errors import RolloutError
from lightning_ppo.rollout.failure_config import StallAction

_log = logging.getLogger(__name__)


class Watchdog:
    """Watches counters: a stall is when none of them has changed for `timeout_s`.

    It knows nothing but what it is told, so that it also works with nothing in flight and while rollouts drain. The
    clock starts with the first call of `progress` or `check` and starts anew only when a counter changes, never because
    somebody asked. To not count time in which nobody waits (training), make the number of waits one of the counters.
    For one thread.

    Args:
        timeout_s: Seconds without progress that make a stall.
        action: `abort` raises, `warn` logs once per stall.
        describe: Says in one line what is in flight and what dispatch waits for.
        clock: Monotonic seconds.
        what: What did not get on; `describe` says why.
        suspect: Names what the user is to look at.
    """

    def __init__(
        self,
        timeout_s: float,
        action: StallAction,
        describe: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        what: str = "no prompt group was finished",
        suspect: Callable[[], str] = lambda: "the engine's log",
    ) -> None:
        self._timeout_s = timeout_s
        self._action = action
        self._describe = describe
        self._clock = clock
        self._what = what
        self._suspect = suspect
        self._counters: tuple[int, ...] | None = None
        self._since_s: float | None = None
        self._warned = False

    @property
    def left_s(self) -> float:
        """Seconds until `check` acts: 0 when it would now, infinite when it has warned of this stall already."""
        if self._warned:
            return math.inf
        if self._since_s is None:
            return self._timeout_s
        return max(0.0, self._since_s + self._timeout_s - self._clock())

    def progress(self, *counters: int) -> None:
        """Tell how far everything is, for example groups committed and steps completed; as often as you like."""
        if counters != self._counters:
            self._counters = counters
            self._since_s = self._clock()
            self._warned = False

    def check(self) -> None:
        """Act if there is a stall.

        Raises:
            RolloutError: no counter has changed for `timeout_s`, and the action is `abort`.
        """
        if self._since_s is None:
            self._since_s = self._clock()
        if self.left_s > 0:
            return
        what = f"{self._what} for timeout_s={self._timeout_s:g}; {self._describe()}; "
        instead = f"look at {self._suspect()}, or set a longer timeout_s"
        if self._action == "abort":
            raise RolloutError(what + instead)
        self._warned = True
        _log.warning("%s%s; failures.stall_action=warn waits on", what, instead)
