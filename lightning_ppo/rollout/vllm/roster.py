"""The servers there are, and where requests wait for one: shared by the event loop, the trainer and the keepers."""

import asyncio
import logging
import threading
from typing import Generic

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.vllm.member import C, Member, MemberState

_log = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Roster(Generic[C]):
    """One member per server, and the requests that wait while none is open. No method but `pick` waits.

    Attributes:
        changed: Notified after every change; its lock guards the members.
    """

    def __init__(self, max_restarts: int) -> None:
        """No members yet.

        Args:
            max_restarts: Restarts that `take_restart` grants.
        """
        self.changed = threading.Condition()
        self.restarts = 0
        self._max_restarts = max_restarts
        self._members: dict[int, Member[C]] = {}
        self._ends: dict[int, str] = {}
        self._end: str | None = None
        self._waiters: list[_Waiter] = []

    def put(self, member: Member[C]) -> None:
        """Add a member, in the place of an earlier one with its index."""
        with self.changed:
            self._members[member.index] = member
            self.changed.notify_all()

    def members(self) -> tuple[Member[C], ...]:
        """The current member of every server, by index."""
        with self.changed:
            return tuple(self._members[index] for index in sorted(self._members))

    def serving(self) -> tuple[Member[C], ...]:
        """The members that get requests and refits, by index."""
        return tuple(member for member in self.members() if member.state is MemberState.SERVING)

    def move(self, member: Member[C], state: MemberState, why: str, level: int = logging.INFO) -> None:
        """Change a member's state and log one line; without effect on a dead one."""
        with self.changed:
            if member.state in (state, MemberState.DEAD):
                return
            member.state = state
            member.suspect = False
            if state is MemberState.DEAD or (state is MemberState.QUARANTINED and member.is_external):
                # what is in flight on a dead server fails soon
                count = member.resent + (member.outstanding if state is MemberState.DEAD else 0)
                member.resent = 0
                why += f"; requests that are sent again: {count}" if count else ""
            self._wake()
        _log.log(level, "vLLM %s is %s: %s", member, state, why)

    def admit(self, member: Member[C], why: str) -> bool:
        """Let a member serve unless it was condemned meanwhile; whether it serves."""
        with self.changed:
            if member.condemned is not None:
                return False
            member.failures = member.successes = member.failed_requests = 0
            self.move(member, MemberState.SERVING, why)
            return True

    def suspect(self, member: Member[C], is_suspect: bool) -> None:
        """Set or clear a member's `suspect`."""
        with self.changed:
            member.suspect = is_suspect and member.state is MemberState.SERVING
            self._wake()

    def condemn(self, member: Member[C], why: str) -> None:
        """Take a member out of service; it needs the current weights, and one of ours a restart, to serve again."""
        with self.changed:
            member.version = None
            member.successes = 0
            if not member.is_external:
                member.condemned = member.condemned or why
        self.move(member, MemberState.QUARANTINED, why, logging.WARNING)

    def take_restart(self) -> int | None:
        """The number of the restart that is granted, from 1; None once all are used up."""
        with self.changed:
            if self.restarts >= self._max_restarts:
                return None
            self.restarts += 1
            return self.restarts

    def bury(self, member: Member[C], why: str) -> None:
        """A member is dead and will not be replaced; with the last one all requests end."""
        with self.changed:
            self._ends[member.index] = f"{member.name} {why}"
            ends = [self._ends[index] for index in sorted(self._ends)]
            is_last = len(ends) == len(self._members)
        if is_last:
            used = f"vllm.max_restarts={self._max_restarts} used up"
            self.end(f"no vLLM server is left, with {used}: {'; '.join(ends)}")

    def end(self, why: str) -> None:
        """No request is served any more; the first reason counts."""
        with self.changed:
            self._end = self._end or why
            self._wake()

    def raise_if_ended(self) -> None:
        """Return if a server serves or may serve again.

        Raises:
            EngineDiedError: none will.
        """
        with self.changed:
            if self._end is not None:
                raise EngineDiedError(self._end)

    async def pick(self, limit_s: float) -> Member[C]:
        """Wait for an open member and count a request there: the one with the least outstanding, ties by index.

        Raises:
            EngineDiedError: none will serve any more.
            EngineError: none served within `limit_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            with self.changed:
                self.raise_if_ended()
                candidates = [member for member in self.members() if member.is_open]
                if candidates:
                    best = min(candidates, key=lambda member: member.outstanding)
                    best.outstanding += 1
                    return best
                waiter: _Waiter = (loop, loop.create_future())
                self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter[1]
            except TimeoutError:
                raise EngineError(f"no vLLM server took a request within {limit_s:g} s: {self.describe()}") from None
            finally:
                with self.changed:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def release(self, member: Member[C], *, succeeded: bool, failed: bool) -> None:
        """A picked request has ended."""
        with self.changed:
            member.outstanding -= 1
            member.resent += failed
            if succeeded:
                member.failed_requests = member.resent = 0

    def describe(self) -> str:
        """One line: every server and its state."""
        return ", ".join(f"{member} {member.state}" for member in self.members()) or "none was started"

    def _wake(self) -> None:
        """Resolve what waits; they look again themselves. Called under the lock."""
        self.changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # The loop is closed: nobody awaits this future any more.
                continue


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
