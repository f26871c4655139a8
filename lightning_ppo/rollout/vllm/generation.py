"""Token ids in, token ids out: vLLM's `/inference/v1/generate`, as the collector's event loop calls it."""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import torch

from lightning_ppo.batch import FinishReason
from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest
from lightning_ppo.rollout.vllm.control import describe_error
from lightning_ppo.rollout.vllm.open_files import OpenFilesError, is_out_of_files

_PATH = "/inference/v1/generate"
_CONNECT_S = 10.0
_CLIENT_ERRORS = range(400, 500)


class ServerFailedError(EngineDiedError):
    """A server did not answer a request properly; another server may."""


class GenerationClient:
    """Sends requests to servers. One HTTP session per event loop; any number of requests at once.

    Cancelling a call closes its connection, which aborts the request on the server.
    """

    def __init__(self, timeout_s: float | None, api_key: str | None = None) -> None:
        """Nothing is opened yet.

        Args:
            timeout_s: Deadline of one response; None leaves it to the caller.
            api_key: Sent as a bearer token.
        """
        self._timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def generate(
        self, server: str, url: str, request: GenerationRequest, attempt_id: str, *, is_urgent: bool = False
    ) -> Generation:
        """Ask one server for one response.

        Args:
            server: What errors call the server.
            url: Its address.
            request: What to sample.
            attempt_id: Name of this attempt, unlike that of any other request on this server.
            is_urgent: Whether it goes before all others that wait there; see `request_body`.

        Raises:
            EngineError: the request itself is refused; no server would take it.
            OpenFilesError: this process may open no more files; the server may be well.
            ServerFailedError: the server is gone, did not answer in time, gave the request up, or answered nonsense.
        """
        label = f"server {server}, request {request.request_id}"
        try:
            async with self._session().post(
                f"{url}{_PATH}",
                json=request_body(request, attempt_id, is_urgent=is_urgent),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
            ) as response:
                content = await response.read()
                status = response.status
        except aiohttp.ServerTimeoutError:
            # the only deadline that aiohttp has of us beside that of the whole request
            raise ServerFailedError(
                f"{label}: {url} did not take a connection within {_CONNECT_S:g} s; is the host reachable?"
            ) from None
        except TimeoutError:
            raise ServerFailedError(
                f"{label}: no answer within request_timeout_s={self._timeout_s}; raise vllm.request_timeout_s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            if is_out_of_files(error):
                raise OpenFilesError(label) from None
            raise ServerFailedError(f"{label}: connection lost ({error or type(error).__name__})") from None
        if status in _CLIENT_ERRORS:
            raise EngineError(f"{label}: refused with {status}: {describe_error(content)}")
        if status != 200:
            raise ServerFailedError(f"{label}: answered {status}: {describe_error(content)}")
        return read_answer(content, request, label)

    def close(self) -> None:
        """Close all sessions, from any thread; a later call opens another. Requests in flight fail."""
        for loop in list(self._sessions):
            self._drop(loop)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        session = self._sessions.pop(loop)
        if loop.is_running():
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(session.close(), loop)
                return
        # Nobody runs this loop any more, so that nothing can be awaited in it; its connections ended with its tasks.
        session.detach()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # How many requests run at once is decided above; a connection that was idle may be half closed.
            for other in [other for other in self._sessions if other.is_closed()]:
                self._drop(other)
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            session = aiohttp.ClientSession(connector=connector, trust_env=False)
            self._sessions[loop] = session
        return session


def request_body(request: GenerationRequest, attempt_id: str, *, is_urgent: bool = False) -> dict[str, Any]:
    """Build the request as vLLM reads it. Everything that shapes the distribution is named: servers have defaults.

    An urgent request is the next to run; none that runs is stopped for it.
    """
    sampling = request.sampling
    return {
        "request_id": attempt_id,
        "priority": -1 if is_urgent else 0,
        "token_ids": list(request.prompt_ids),
        "stream": False,
        "sampling_params": {
            "n": 1,
            "max_tokens": sampling.max_tokens,
            "min_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            # Only our stop tokens end a response, not those of the model's config.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "detokenize": False,
        },
    }


def read_answer(content: bytes, request: GenerationRequest, label: str) -> Generation:
    """Read vLLM's answer.

    Args:
        content: Body of the response.
        request: What was asked for.
        label: Names server and request in errors.

    Raises:
        EngineError: tokens carry no weight version, or one that is no number: every server would answer so.
        ServerFailedError: the answer is not complete.
    """
    try:
        choice = json.loads(content)["choices"][0]
        finish_reason = choice["finish_reason"]
        token_ids = tuple(int(token) for token in choice["token_ids"] or ())
        entries = (choice["logprobs"] or {}).get("content") or ()
        scored = tuple(int(entry["token_id"]) for entry in entries)
        values = [float(entry["logprob"]) for entry in entries]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerFailedError(f"{label}: answer cannot be read ({error!r})") from None
    if finish_reason not in ("stop", "length"):
        raise ServerFailedError(f"{label}: given up after {len(token_ids)} tokens (finish_reason={finish_reason})")
    if not token_ids or scored != token_ids:
        raise ServerFailedError(f"{label}: {len(token_ids)} tokens with log-probs of {len(scored)} others")
    reason: FinishReason = "stop" if finish_reason == "stop" else "length"
    return Generation(
        request_id=request.request_id,
        token_ids=token_ids,
        # as float32, which is what the server computed with
        logprobs=tuple(torch.tensor(values, dtype=torch.float32).tolist()),
        finish_reason=reason,
        policy_versions=read_versions(choice.get("weight_versions"), len(token_ids), label),
    )


def read_versions(spans: Any, num_tokens: int, label: str) -> tuple[int, ...]:
    """Spread spans of weight versions over tokens.

    Args:
        spans: `[{"version": "3", "start": 0, "end": 17}, ...]`, in order, without gaps.
        num_tokens: Tokens of the response.
        label: Names server and request in errors.

    Raises:
        EngineError: they do not cover the tokens exactly, or a version is no number.
    """
    versions: list[int] = []
    try:
        for span in spans or ():
            start, end = int(span["start"]), int(span["end"])
            if start != len(versions) or end < start:
                raise EngineError(f"{label}: weight versions {spans} do not follow each other; use vllm==0.32.*")
            versions.extend([int(span["version"])] * (end - start))
    except (ValueError, KeyError, TypeError):
        raise EngineError(
            f"{label}: weight versions {spans} are not ours; send weights before the first request, use vllm==0.32.*"
        ) from None
    if len(versions) != num_tokens:
        raise EngineError(
            f"{label}: {num_tokens} tokens carry weight versions of {len(versions)}; use vllm==0.32.*, which has them"
        )
    return tuple(versions)
