"""The life of one server, in a thread of its own: start, probes, quarantine, restart."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.launch import Launcher
from lightning_ppo.rollout.vllm.member import C, Member, MemberState
from lightning_ppo.rollout.vllm.open_files import OpenFilesError
from lightning_ppo.rollout.vllm.roster import Roster
from lightning_ppo.rollout.vllm.starter import POLL_S, AsleepError, FleetClosedError, Starter
from lightning_ppo.rollout.vllm.update_gate import UpdateGate

_log = logging.getLogger(__name__)

_ALIVE_POLL_S = 0.25
_LONGEST_PAUSE_S = 30.0


class Keeper(Generic[C]):
    """Keeps one server in service. Probes never wait for another server, for a refit or for a request.

    Attributes:
        name: What messages call the server.
        start_error: Why it did not come up at first; set before the roster is notified.
        is_up: Whether it did; set before the roster is notified.
        is_held: Whether its server has ended, and is not started again before the engine wakes up; set likewise.
    """

    def __init__(
        self,
        index: int,
        config: VLLMConfig,
        launcher: Launcher | None,
        make_control: Callable[[str], C],
        push: Callable[[Member[C]], None],
        roster: Roster[C],
        gate: UpdateGate,
        closing: threading.Event,
    ) -> None:
        """Nothing runs yet; see `Fleet` for the arguments."""
        self.start_error: EngineError | None = None
        self.is_up = False
        self.is_held = False
        self._starter = Starter(index, config, launcher, make_control, roster, gate, closing)
        self.name = self._starter.name
        self._index = index
        self._config = config
        self._push = push
        self._roster = roster
        self._gate = gate
        self._closing = closing
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"vllm-{self.name}", daemon=True)

    def start(self) -> None:
        """Start the thread, and with it the server."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended its server for good."""
        return not self._thread.is_alive()

    def probe_now(self) -> None:
        """Do not wait for the next probe's time."""
        self._wake.set()

    def join(self, limit_s: float) -> None:
        """Wait for the thread's end, which follows `closing` and `probe_now`."""
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            try:
                member = self._starter.come_up()
            except EngineError as error:
                with self._roster.changed:
                    self.start_error = error
                    self._roster.changed.notify_all()
                return
            self._enter(member, "came up in {:.1f} s")
            with self._roster.changed:
                self.is_up = True
                self._roster.changed.notify_all()
            while True:
                replacement = self._replace(member, self._watch(member))
                if replacement is None:
                    return
                member = replacement
        except FleetClosedError:
            return
        except Exception as error:
            # A defect: retries would only hide it.
            _log.exception("vLLM %s is not looked after any more", self.name)
            self._roster.end(f"vLLM {self.name} is not looked after any more: {type(error).__name__}: {error}")

    def _enter(self, member: Member[C], why: str) -> None:
        """Give a member the current weights if it needs them, and let it serve.

        Raises:
            EngineError: it does not take them.
            AsleepError: the engine sleeps.
        """
        with self._gate.hold_unless(self._closing) as held:
            if not held:
                raise FleetClosedError
            if not self._gate.awake.is_set():
                raise AsleepError
            version = self._gate.version
            returns = member.state is MemberState.QUARANTINED
            # A server that is not ours may have been restarted without our knowledge.
            if version is not None and (member.version != version or (member.is_external and returns)):
                self._push(member)
                member.version = version
            what = why.format(time.monotonic() - member.since)
            self._roster.admit(member, what if version is None else f"{what}, with policy version {version}")

    def _watch(self, member: Member[C]) -> str:
        """Probe a member for as long as it need not be replaced; why it must be."""
        due = time.monotonic()
        while True:
            # After a slow probe the next one is due at once, but not sooner than the shortest poll.
            due = max(due + self._config.probe_interval_s, time.monotonic() + POLL_S)
            end = self._wait_until(due, member)
            if end is not None:
                return end
            due = min(due, time.monotonic())
            try:
                problem = self._starter.probe(member, self._config.probe_timeout_s)
            except OpenFilesError as error:
                _log.warning("vLLM %s cannot be probed: %s", member, error)
                continue
            if problem is None:
                self._on_success(member)
            else:
                self._on_failure(member, problem)
                if not member.is_external and member.failures >= 2 * self._config.quarantine_after:
                    return f"hangs: {member.failures} probes in a row failed ({problem})"

    def _wait_until(self, due: float, member: Member[C]) -> str | None:
        while True:
            remaining = due - time.monotonic()
            woken = self._wake.wait(max(0.0, min(remaining, _ALIVE_POLL_S)))
            if woken:
                self._wake.clear()
            self._starter.raise_if_closing()
            server = self._starter.server
            if server is not None and not server.is_alive():
                return server.describe_end()
            if member.condemned is not None:
                return member.condemned
            if woken or remaining <= 0:
                return None

    def _on_success(self, member: Member[C]) -> None:
        member.failures = 0
        member.successes += 1
        if member.state is MemberState.SERVING:
            self._roster.suspect(member, False)
        elif member.successes >= self._config.trust_after:
            try:
                self._enter(member, f"{member.successes} probes in a row succeeded")
            except AsleepError:
                return
            except (EngineError, OSError) as error:
                _log.warning("vLLM %s answers, but does not take the weights: %s", member, error)
                self._roster.condemn(member, f"it does not take the weights: {error}")

    def _on_failure(self, member: Member[C], problem: str) -> None:
        member.successes = 0
        member.failures += 1
        if member.suspect:
            why = f"a request and the probe after it failed ({problem})"
        elif member.failures >= self._config.quarantine_after:
            why = f"{member.failures} probes in a row failed ({problem})"
        else:
            return
        self._roster.move(member, MemberState.QUARANTINED, why, logging.WARNING)

    def _replace(self, member: Member[C], why: str) -> Member[C] | None:
        """Restart the server until it serves; None once the restarts are used up."""
        died = time.monotonic()
        server = self._starter.server
        if server is not None and server.is_alive():
            # it has not ended by itself, but will be ended now
            why = f"{why}; it {server.describe_end()}"
        self._roster.move(member, MemberState.DEAD, why, logging.WARNING)
        pause_s = 0.0
        number = None
        while True:
            self._starter.end()
            self._wait_awake()
            number = number or self._roster.take_restart()
            if number is None:
                _log.error("vLLM %s is not restarted: max_restarts=%d used up", self.name, self._config.max_restarts)
                self._roster.bury(member, why)
                return None
            if self._closing.wait(pause_s):
                raise FleetClosedError
            _log.warning("vLLM %s: restart %d of at most %d", self.name, number, self._config.max_restarts)
            try:
                replacement = self._starter.come_up()
                self._enter(replacement, f"replaces one that died {time.monotonic() - died:.1f} s ago")
            except AsleepError:
                # no fault of the server's: the same restart goes on later
                self._give_up("its start ends, for the engine sleeps")
            except (EngineError, OSError) as error:
                self._starter.raise_if_closing()
                why = str(error).removeprefix(f"vLLM {self.name} ")
                self._give_up(why)
                _log.warning("vLLM %s: restart %d failed: %s", self.name, number, why)
                pause_s = min(max(1.0, 2 * pause_s), _LONGEST_PAUSE_S)
                number = None
            else:
                return replacement

    def _give_up(self, why: str) -> None:
        for half_way in self._roster.members():
            if half_way.index == self._index:
                self._roster.move(half_way, MemberState.DEAD, why, logging.WARNING)

    def _wait_awake(self) -> None:
        if self._gate.awake.is_set():
            return
        _log.warning("vLLM %s is started again once the engine wakes up", self.name)
        self._set_held(True)
        while not self._gate.awake.wait(POLL_S):
            self._starter.raise_if_closing()
        self._set_held(False)

    def _set_held(self, is_held: bool) -> None:
        with self._roster.changed:
            self.is_held = is_held
            self._roster.changed.notify_all()
