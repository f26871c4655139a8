"""The servers' sleep: they hold their requests, and on a GPU give its memory back, while the trainer computes there."""

from collections.abc import Callable, Sequence

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.transport import Lanes
from lightning_ppo.rollout.vllm.control import Control, is_healed_by_restart
from lightning_ppo.rollout.vllm.fleet import Fleet
from lightning_ppo.rollout.vllm.member import Member, MemberState


class Sleep:
    """Puts all servers to sleep and wakes them; one that fails is taken out of service, and the others go on.

    Attributes:
        is_on: Whether they sleep.
    """

    def __init__(self, fleet: Fleet[Control], limit_s: float, *, frees_memory: bool) -> None:
        """Everybody is awake.

        Args:
            fleet: The servers.
            limit_s: Deadline of every server's answer.
            frees_memory: Whether they give their memory back, and lose their weights with it.
        """
        self.is_on = False
        self._fleet = fleet
        self._limit_s = limit_s
        self._frees_memory = frees_memory
        self._sleepers: tuple[Member[Control], ...] = ()

    def begin(self) -> None:
        """Put them to sleep. Without effect if they sleep.

        No server is started until `end`: one that dies, fails here or is still starting is ended, and comes back then.

        Raises:
            EngineError: none sleeps, though one answers; or one that had to end did not in time. They stay awake.
        """
        if self.is_on:
            return
        with self._fleet.falling_asleep(self._limit_s) as members:
            for member in members:
                if self._frees_memory:
                    member.version = None
            self._sleepers = self._tell(members, self._put_to_sleep, "fall asleep")
            for member in self._fleet.members():
                if self._frees_memory and member.state is MemberState.QUARANTINED:
                    self._fleet.condemn(member, "it was out of service when the engine went to sleep")
        self.is_on = True

    def end(self) -> None:
        """Wake them. Without effect if they are awake.

        Raises:
            EngineError: none wakes up, though one answers.
        """
        if not self.is_on:
            return
        self.is_on = False
        # one that was quarantined in its sleep must not return to service asleep
        members = [member for member in self._sleepers if member.state is not MemberState.DEAD]
        self._sleepers = ()
        try:
            self._tell([member for member in members if member.condemned is None], self._wake, "wake up")
        finally:
            self._fleet.woken_up()

    def _tell(
        self, members: Sequence[Member[Control]], call: Callable[[Control], None], what: str
    ) -> tuple[Member[Control], ...]:
        """Those that obeyed; the others are condemned."""
        for member in members:
            member.control.name = str(member)
        with Lanes([member.control for member in members]) as lanes:
            lanes.submit(call)
        failures = lanes.failures
        for member in members:
            if member.control.name in failures:
                self._fleet.condemn(member, f"it does not {what}: {failures[member.control.name]}")
        hangs_too = not any(member.is_external for member in members)
        has_refused = not all(is_healed_by_restart(error, hangs_too=hangs_too) for error in failures.values())
        if len(failures) == len(members) and has_refused:
            raise EngineError(f"no vLLM server can {what}: {'; '.join(str(error) for error in failures.values())}")
        return tuple(member for member in members if member.control.name not in failures)

    def _put_to_sleep(self, control: Control) -> None:
        if self._frees_memory:
            control.sleep(self._limit_s)
        else:
            control.pause(self._limit_s)

    def _wake(self, control: Control) -> None:
        if self._frees_memory:
            control.wake(self._limit_s)
        else:
            control.resume(self._limit_s)
