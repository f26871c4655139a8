"""From nothing to a server that answers."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.launch import Launcher, Server
from lightning_ppo.rollout.vllm.member import C, Member, MemberState
from lightning_ppo.rollout.vllm.open_files import OpenFilesError
from lightning_ppo.rollout.vllm.roster import Roster
from lightning_ppo.rollout.vllm.update_gate import UpdateGate

POLL_S = 0.1
"""Shortest time between two probes of a server."""

_PORT_ATTEMPTS = 3


class FleetClosedError(Exception):
    """The fleet is being closed; ends what a keeper does."""


class AsleepError(Exception):
    """The engine sleeps; ends the start of a server, which would take the memory that training was given."""


class Starter(Generic[C]):
    """Starts one server, as often as it is asked to; or waits for one that is not ours. Belongs to its keeper's thread.

    Attributes:
        name: What messages call the server.
        server: The server that was started last; None for one that is not ours.
    """

    def __init__(
        self,
        index: int,
        config: VLLMConfig,
        launcher: Launcher | None,
        make_control: Callable[[str], C],
        roster: Roster[C],
        gate: UpdateGate,
        closing: threading.Event,
    ) -> None:
        """Nothing is started yet; see `Fleet` for the arguments."""
        self.name = f"server_{index}" if launcher is not None else config.urls[index]
        self.server: Server | None = None
        self._index = index
        self._config = config
        self._launcher = launcher
        self._make_control = make_control
        self._roster = roster
        self._gate = gate
        self._closing = closing

    def come_up(self) -> Member[C]:
        """A member that answers.

        Raises:
            EngineError: it did not within `start_timeout_s`, or ended.
            AsleepError: the engine went to sleep meanwhile.
            FleetClosedError: the fleet is being closed.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        if self._launcher is None:
            return self._until_ready(self._new_member(self.name), deadline)
        attempt = 1
        while True:
            self.server = self._launcher.launch(self._index)
            member = self._new_member(self.server.url)
            try:
                return self._until_ready(member, deadline)
            except EngineError as error:
                self._roster.move(member, MemberState.DEAD, str(error), logging.WARNING)
                if attempt == _PORT_ATTEMPTS or not self.server.port_taken():
                    raise
            attempt += 1
            self.server.close()

    def _new_member(self, url: str) -> Member[C]:
        member = Member(self._index, self.name, url, self._make_control(url), is_external=self._launcher is None)
        self._roster.put(member)
        return member

    def _until_ready(self, member: Member[C], deadline: float) -> Member[C]:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise EngineError(self._describe_timeout())
            try:
                problem = self.probe(member, min(self._config.probe_timeout_s, remaining))
            except OpenFilesError as error:
                problem = str(error)
            if self.server is not None and not self.server.is_alive():
                raise EngineDiedError(f"vLLM {self.name} did not start: it {self.server.describe_end()}")
            if problem is None:
                return member
            if not self._gate.awake.is_set():
                raise AsleepError
            self._closing.wait(POLL_S)

    def _describe_timeout(self) -> str:
        limit = f"{self._config.start_timeout_s:g}"
        if self.server is None:
            return (
                f"vllm.urls={self.name} does not answer /health within start_timeout_s={limit}; start it or correct it"
            )
        end = self.server.describe_end()
        return f"vllm.start_timeout_s={limit} ran out before vLLM {self.name} answered; raise it; it {end}"

    def probe(self, member: Member[C], limit_s: float) -> str | None:
        """What is wrong with a member; None if nothing is.

        Raises:
            OpenFilesError: it could not be asked; nothing is known about it.
            FleetClosedError: the fleet is being closed.
        """
        problem = None
        try:
            member.control.health(limit_s)
        except OpenFilesError:
            raise
        except EngineError as error:
            problem = str(error)
        self.raise_if_closing()
        return problem

    def raise_if_closing(self) -> None:
        """Raise `FleetClosedError` if the fleet is being closed."""
        if self._closing.is_set():
            raise FleetClosedError

    def end(self) -> None:
        """End the server at once, if it is ours; what it says about its end must have been read."""
        if self.server is not None:
            self.server.stop(kill=True)
            self.server.close()
