"""The servers of a run: started together, watched, replaced when they die, given requests and weights."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.keeper import Keeper
from lightning_ppo.rollout.vllm.launch import Launcher
from lightning_ppo.rollout.vllm.member import C, Member, MemberState
from lightning_ppo.rollout.vllm.roster import Roster
from lightning_ppo.rollout.vllm.update_gate import UpdateGate

Progress = Callable[[str, MemberState, float], None]
"""Called with a server's name, its state, and the seconds since the start of all."""

_TICK_S = 10.0
_JOIN_S = 5.0


class Fleet(Generic[C]):
    """All servers, and what happens to them.

    `start`, `update` and `close` block and belong to one thread at a time; `pick` belongs to event loops; everything
    else may be called from anywhere and returns at once.

    Lock order: the update gate (held by `update` and `falling_asleep`, and during every `push`) before the roster's
    lock, which is held for moments only. Who holds the gate may wait for answers of servers, each with a deadline, and
    for requests that have been picked; never for a request that waits in `pick`, because that may need a restarted
    server, which needs the gate. Then nothing can deadlock: a server that died during a refit comes back after it, and
    a refit waits at most for one `push` per restarted server.
    """

    def __init__(
        self,
        config: VLLMConfig,
        launcher: Launcher | None,
        make_control: Callable[[str], C],
        push: Callable[[Member[C]], None],
    ) -> None:
        """Nothing is started yet.

        Args:
            config: Settings.
            launcher: Who starts the `config.num_servers` servers; None for the servers of `config.urls`. Closed with
                the fleet.
            make_control: Makes the line to a server from its address.
            push: Gives one member the current weights and blocks until it has them, all within a deadline. Called in
                the thread of that server, under the update gate, before the member serves: after a restart, after a
                refit that it missed, and always when a server that is not ours returns from quarantine. It raises
                `EngineError` or `OSError` if the member does not take them; that costs a server of ours a restart.
        """
        self._config = config
        self._launcher = launcher
        self._roster: Roster[C] = Roster(config.max_restarts)
        self._gate = UpdateGate()
        self._closing = threading.Event()
        self._closed = False
        count = len(config.urls) if launcher is None else config.num_servers
        self._keepers = tuple(
            Keeper(index, config, launcher, make_control, push, self._roster, self._gate, self._closing)
            for index in range(count)
        )

    @property
    def version(self) -> int | None:
        """The policy version that serving members have; None before the first `update`."""
        return self._gate.version

    @property
    def restarts(self) -> int:
        """Restarts so far, failed ones included."""
        return self._roster.restarts

    @property
    def pick_limit_s(self) -> float:
        """How long `pick` waits: a start, and the weights after it."""
        return self._config.start_timeout_s + self._config.update_timeout_s

    def start(self, on_progress: Progress | None = None) -> None:
        """Start all servers at the same time and block until all answer; on an error everything is closed again.

        Args:
            on_progress: Called in this thread for every change of a server's state, and every ten seconds for servers
                that have not come up.

        Raises:
            EngineError: a server ended on the way, or did not answer within `start_timeout_s`.
        """
        began = time.monotonic()
        try:
            for keeper in self._keepers:
                keeper.start()
            seen: dict[str, tuple[MemberState, float]] = {}
            while True:
                with self._roster.changed:
                    errors = [keeper.start_error for keeper in self._keepers if keeper.start_error is not None]
                    states = {member.name: member.state for member in self._roster.members()}
                    self._roster.raise_if_ended()
                    is_ready = all(keeper.is_up for keeper in self._keepers)
                    if not errors and states == {name: state for name, (state, _) in seen.items()} and not is_ready:
                        self._roster.changed.wait(1.0)
                _report(on_progress, states, seen, time.monotonic() - began)
                if errors:
                    raise type(errors[0])("; ".join(dict.fromkeys(str(error) for error in errors)))
                if is_ready:
                    return
        except BaseException:
            self.close()
            raise

    def members(self) -> tuple[Member[C], ...]:
        """The current member of every server, whatever its state, by index."""
        return self._roster.members()

    def serving(self) -> tuple[Member[C], ...]:
        """The members that get requests and refits, by index."""
        return self._roster.serving()

    def describe(self) -> str:
        """One line: every server and its state."""
        return self._roster.describe()

    async def pick(self) -> Member[C]:
        """Wait for a serving member and count a request there: the one with the least outstanding, ties by index.

        Call `release` when the request has ended, in whatever way.

        Raises:
            EngineDiedError: no server will serve any more; it names them, with the last lines of their logs.
            EngineError: none served within `pick_limit_s`.
        """
        return await self._roster.pick(self.pick_limit_s)

    def release(self, member: Member[C], *, succeeded: bool = False, failed: bool = False) -> None:
        """The request that was picked for `member` has ended.

        Args:
            member: Where it was.
            succeeded: Whether it has its response.
            failed: Whether the server failed it, so that it is sent again.
        """
        self._roster.release(member, succeeded=succeeded, failed=failed)

    def report(self, member: Member[C], error: BaseException) -> bool:
        """A request failed because of its server: no connection, no answer in time, an answer of 5xx, a cut stream.

        The member gets no requests until a probe, which is sent at once, succeeds; if it fails, the member is
        quarantined. A member whose requests keep failing while its probes succeed is condemned: after
        `quarantine_after` failures without a response in between, those within one `probe_interval_s` counted once.

        Returns:
            Whether it was counted, and is news.
        """
        now = time.monotonic()
        with self._roster.changed:
            if member.state is not MemberState.SERVING:
                return False
            if is_news := now - member.failed_at >= self._config.probe_interval_s:
                member.failed_requests += 1
                member.failed_at = now
            count = member.failed_requests
        if count >= self._config.quarantine_after:
            reason = f"{type(error).__name__}: {error}"
            self.condemn(member, f"requests keep failing, though the server says that it is well ({reason})")
        else:
            self._roster.suspect(member, True)
            self._keepers[member.index].probe_now()
        return is_news

    def condemn(self, member: Member[C], why: str) -> None:
        """A member cannot be trusted any more, for example because a refit failed half-way.

        It gets no requests from now on. One of ours is restarted; another one may return after `trust_after` probes.
        Both get the current weights before they serve. May be called while `update` is open.
        """
        self._roster.condemn(member, why)
        self._keepers[member.index].probe_now()

    @contextmanager
    def update(self, version: int, limit_s: float | None = None) -> Iterator[tuple[Member[C], ...]]:
        """Refit: no member starts to serve, and nothing is pushed, while this is open.

        Yields the members to refit, perhaps none. Set `member.version = None` before its weights are touched, and
        `member.version = version` once it has confirmed. At the end `version` is current, and members without it are
        condemned. After an exception the old version stays current, and members that lost it are condemned: they may
        have some weights of the new one. Servers that are not among the members get the weights by `push` later: from
        the end of the block on `push` must send the current ones.

        Args:
            version: The new policy version, also where only the number changes.
            limit_s: How long to wait until it can begin; None means `update_timeout_s`.

        Raises:
            EngineError: it could not begin: a restarted server is being given its weights.
        """
        with self._gate.hold(self._config.update_timeout_s if limit_s is None else limit_s):
            members = self._roster.serving()
            current, why = self._gate.version, f"the update to policy version {version} broke off"
            try:
                yield members
                current, why = version, f"it does not serve policy version {version}"
            finally:
                self._gate.version = current
                for member in members:
                    if member.version != current and member.state is not MemberState.DEAD:
                        self.condemn(member, why)

    @contextmanager
    def falling_asleep(self, limit_s: float) -> Iterator[tuple[Member[C], ...]]:
        """From here to `woken_up` no server is started, and none is let into service.

        Yields the members to put to sleep, perhaps none. Set `member.version = None` if it loses its weights, and
        condemn it if it does not obey. At the end every server of ours that starts or is condemned has ended.

        Args:
            limit_s: How long to wait until it can begin, and until those servers have ended.

        Raises:
            EngineError: one of the two took longer. As after every exception, servers may be started again.
        """
        try:
            with self._gate.hold(limit_s):
                self._gate.awake.clear()
                yield self._roster.serving()
            # not under the gate, for which a start that is complete waits before it finds that it is not wanted
            with self._roster.changed:
                self._roster.changed.wait_for(lambda: not self._leaving(), limit_s)
                leaving = self._leaving()
            if leaving:
                raise EngineError(
                    f"vllm.update_timeout_s={limit_s:g} ran out before {', '.join(leaving)} had ended, which must not"
                    " keep the device while the engine sleeps; raise it"
                )
        except BaseException:
            self._gate.awake.set()
            raise

    def woken_up(self) -> None:
        """Servers may be started again."""
        self._gate.awake.set()

    def check_health(self) -> None:
        """Return if a server serves or may serve again.

        Raises:
            EngineDiedError: none will; it names them, with the last lines of their logs.
        """
        self._roster.raise_if_ended()

    def close(self) -> None:
        """Stop our servers, all at the same time, and fail what waits; returns within seconds, may be called again."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._roster.end("the vLLM servers of this run are closed")
        for keeper in self._keepers:
            keeper.probe_now()
        if self._launcher is not None:
            self._launcher.close()
        deadline = time.monotonic() + _JOIN_S
        for keeper in self._keepers:
            keeper.join(max(0.0, deadline - time.monotonic()))

    def _leaving(self) -> list[str]:
        """Names of our servers that have to end before training may use their device."""
        return [
            member.name
            for member, keeper in zip(self._roster.members(), self._keepers, strict=True)
            if not member.is_external
            and (member.condemned is not None or member.state in (MemberState.STARTING, MemberState.DEAD))
            and not (keeper.is_held or keeper.is_over)
        ]


def _report(
    on_progress: Progress | None,
    states: dict[str, MemberState],
    seen: dict[str, tuple[MemberState, float]],
    seconds: float,
) -> None:
    for name, state in states.items():
        before, told = seen.get(name, (None, 0.0))
        if state is not before or (state is MemberState.STARTING and seconds - told >= _TICK_S):
            seen[name] = (state, seconds)
            if on_progress is not None:
                on_progress(name, state, seconds)
