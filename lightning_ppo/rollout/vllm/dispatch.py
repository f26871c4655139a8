"""Which server answers a request, and what happens when it does not."""

import asyncio
import logging
import secrets

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest
from lightning_ppo.rollout.vllm.control import Control
from lightning_ppo.rollout.vllm.fleet import Fleet
from lightning_ppo.rollout.vllm.generation import GenerationClient, ServerFailedError
from lightning_ppo.rollout.vllm.member import Member, MemberState

_log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Servers that may fail one request before it is taken for the cause."""
_DEATH_POLL_S = 0.5


class Dispatcher:
    """Hands requests to the serving members of a fleet. Keeps nothing of its own."""

    def __init__(self, fleet: Fleet[Control], client: GenerationClient) -> None:
        """Keep both.

        Args:
            fleet: The servers.
            client: Sends requests.
        """
        self._fleet = fleet
        self._client = client

    async def generate(self, request: GenerationRequest) -> Generation:
        """Let the server with the least outstanding requests answer; when it fails, the next one, with the same seed.

        Raises:
            EngineError: the request was refused, or `_ATTEMPTS` servers failed it.
            EngineDiedError: no server will serve any more.
        """
        return (await self._first_answer(request))[1]

    async def probe(self, request: GenerationRequest) -> dict[str, Generation]:
        """Let every serving member answer; if none does, the first one that serves again.

        Returns:
            The answers by the members' names, without members that failed: they do not serve any more.

        Raises:
            EngineError: as `generate`.
        """
        members = self._fleet.serving()
        answers = await asyncio.gather(
            *(self._ask(member, request, is_urgent=True) for member in members), return_exceptions=True
        )
        found: dict[str, Generation] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, ServerFailedError):
                _log.warning("%s", answer)
                self._fleet.report(member, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[member.name] = answer
        if not found:
            member, generation = await self._first_answer(request, is_urgent=True)
            found[member.name] = generation
        return found

    async def _first_answer(
        self, request: GenerationRequest, *, is_urgent: bool = False
    ) -> tuple[Member[Control], Generation]:
        failure: ServerFailedError | None = None
        for _ in range(_ATTEMPTS):
            member = await self._fleet.pick()
            answered = failed = False
            try:
                generation = await self._ask(member, request, is_urgent=is_urgent)
                answered = True
                return member, generation
            except ServerFailedError as error:
                failure, failed = error, True
                # a death cuts off many at once, which the line about it counts
                level = logging.WARNING if self._fleet.report(member, error) else logging.DEBUG
                _log.log(level, "%s; it is sent again", error)
            finally:
                self._fleet.release(member, succeeded=answered, failed=failed)
        raise EngineError(f"request {request.request_id} failed on {_ATTEMPTS} servers in turn; the last: {failure}")

    async def _ask(self, member: Member[Control], request: GenerationRequest, *, is_urgent: bool = False) -> Generation:
        # vLLM refuses a name that is in use, and the request may still run where it was sent first
        attempt_id = f"{request.request_id}-{secrets.token_hex(4)}"
        answer = asyncio.ensure_future(
            self._client.generate(str(member), member.url, request, attempt_id, is_urgent=is_urgent)
        )
        try:
            # A host that is gone, or a server whose engine is, may leave the connection open for ever.
            while not (await asyncio.wait({answer}, timeout=_DEATH_POLL_S))[0]:
                if member.state is MemberState.DEAD:
                    raise ServerFailedError(f"server {member}, request {request.request_id}: the server is dead")
            return answer.result()
        finally:
            if answer.cancel():
                await asyncio.wait({answer})
