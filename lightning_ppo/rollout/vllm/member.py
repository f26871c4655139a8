"""One server as the fleet sees it."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


class ControlLike(Protocol):
    """What the fleet asks of a server."""

    def health(self, timeout_s: float) -> None:
        """Return if the server says that it is well.

        Raises:
            EngineError: it does not, or not within `timeout_s`; nothing else, however dead it is.
        """
        ...


C = TypeVar("C", bound=ControlLike)


class MemberState(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"
    """Does not answer yet, or has not got the current weights yet."""
    SERVING = "serving"
    """Gets requests and refits."""
    QUARANTINED = "quarantined"
    """Runs, but gets neither requests nor refits until its probes succeed again and it has the current weights."""
    DEAD = "dead"
    """Gone for good; if it is replaced, the replacement is another `Member`."""


@dataclass(eq=False, repr=False)
class Member(Generic[C]):
    """One life of one server: a restarted server is a new member with the same name. Hashed by identity.

    `version` is written by whoever holds the fleet's update gate, everything else by the fleet under its lock.

    Attributes:
        index: Number of the server.
        name: What messages call it: `server_0`, or the address of a server that is not ours.
        url: Where it answers.
        control: The line to it, from the fleet's `make_control`.
        is_external: Whether it is the user's.
        state: Where it is in its life.
        outstanding: Requests that were picked for it and not released.
        version: Policy version of its weights; None before the first.
        suspect: A request failed there; it gets no more until a probe has succeeded.
        condemned: Why it must be replaced.
        failures: Failed probes in a row.
        successes: Successful probes in a row.
        failed_requests: Failed requests in a row, those of one probe interval counted once.
        failed_at: When the last of them was counted.
        resent: Requests that failed there since its last response, and are sent again.
        since: When it was made.
    """

    index: int
    name: str
    url: str
    control: C
    is_external: bool
    state: MemberState = MemberState.STARTING
    outstanding: int = 0
    version: int | None = None
    suspect: bool = False
    condemned: str | None = None
    failures: int = 0
    successes: int = 0
    failed_requests: int = 0
    failed_at: float = float("-inf")
    resent: int = 0
    since: float = field(default_factory=time.monotonic)

    @property
    def is_open(self) -> bool:
        """Whether it gets requests now."""
        return self.state is MemberState.SERVING and not self.suspect

    def __str__(self) -> str:
        """Name and address, once."""
        return self.name if self.is_external else f"{self.name} ({self.url})"
