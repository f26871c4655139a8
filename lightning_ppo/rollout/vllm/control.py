"""A vLLM server's control plane: blocking calls with deadlines, on Python's own HTTP client."""

import http.client
import json
import select
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.vllm.config import API_KEY
from lightning_ppo.rollout.vllm.open_files import OpenFilesError, is_out_of_files

_SLICE_S = 0.5
"""A call that is not answered looks after the server this often."""
_HEALTH_S = 2.0
"""Deadline of that look."""
_LONGEST_REASON = 400
_WRAPPING = "Call to collective_rpc method failed: "
"""What vLLM puts before the reason of a worker."""


class RefusedError(EngineError):
    """A server is there, but did not do what it was asked to."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        """Keep the HTTP status and the server's reason beside the message."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class SilentError(EngineError):
    """A server did not answer in time: it hangs, or had too little time."""


def is_healed_by_restart(error: EngineError, *, hangs_too: bool) -> bool:
    """Whether a server that failed with this error can be replaced by a new start of itself.

    Args:
        error: What it answered, or did not.
        hangs_too: Whether one that hangs counts as dead: it is ours, and had time enough before.
    """
    return isinstance(error, (EngineDiedError, SilentError) if hangs_too else EngineDiedError)


class Control:
    """Calls of one server. Any number of threads may call at once; every call has a connection of its own.

    A call that a dying engine never answers (vLLM 0.32 leaves `/update_weights` hanging) ends as soon as the server's
    health says so.

    Attributes:
        name: What errors call the server.
        url: Its address.
    """

    def __init__(self, url: str, name: str | None = None, *, api_key: str | None = None) -> None:
        """Nothing is sent yet.

        Args:
            url: `http://host:port`, perhaps with a path before the server's own.
            name: What errors call the server; None means its address.
            api_key: Sent as a bearer token.
        """
        self.url = url.rstrip("/")
        self.name = name or self.url
        parts = urlsplit(self.url)
        self._host, self._port, self._is_https = parts.hostname or "", parts.port, parts.scheme == "https"
        self._prefix = parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    # ------------------------------------------------------------------ state

    def health(self, timeout_s: float) -> None:
        """Return if the server says that it is well.

        Raises:
            EngineError: it does not, or not in time.
        """
        self._call("GET", "/health", timeout_s, watch=False)

    def takes_token_ids(self, timeout_s: float) -> bool:
        """Whether the server answers requests in token ids; an empty one is refused by those that do.

        Raises:
            EngineError: it wants an API key that we do not have.
        """
        try:
            self._call("POST", "/inference/v1/generate", timeout_s, {})
        except RefusedError as error:
            if error.status == http.HTTPStatus.UNAUTHORIZED:
                raise EngineError(
                    f"server {self.name} wants another API key; set {API_KEY} in the trainer's environment"
                ) from None
            return error.status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY)
        return True

    def vllm_version(self, timeout_s: float) -> str:
        """Version of vLLM."""
        return str(self._call("GET", "/version", timeout_s).get("version", "unknown"))

    def version(self, timeout_s: float) -> str:
        """Version of the weights that the server says it serves."""
        return str(self._call("GET", "/weight_info", timeout_s).get("weight_version"))

    def is_sleeping(self, timeout_s: float) -> bool:
        """Whether the server sleeps."""
        return bool(self._call("GET", "/is_sleeping", timeout_s).get("is_sleeping"))

    def is_paused(self, timeout_s: float) -> bool:
        """Whether the server holds its requests."""
        return bool(self._call("GET", "/is_paused", timeout_s).get("is_paused"))

    def world_size(self, timeout_s: float) -> int:
        """Workers of the server, each of which receives weights."""
        return int(self._call("GET", "/get_world_size", timeout_s)["world_size"])

    # ------------------------------------------------------------------ weights

    def pause(self, timeout_s: float, *, clear_cache: bool = True) -> None:
        """Hold all requests; they go on after `resume`.

        Args:
            timeout_s: Deadline.
            clear_cache: Forget all keys and values, those of requests in flight too: they are computed again under the
                weights that are served then.

        Raises:
            RefusedError: as for every call: the server answered, but with an error.
            EngineDiedError: it is not reachable, or its engine is gone.
            OpenFilesError: this process may open no more files.
            EngineError: it did not answer in time.
        """
        query = urlencode({"mode": "keep", "clear_cache": str(clear_cache).lower()})
        self._call("POST", f"/pause?{query}", timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Go on with what `pause` held."""
        self._call("POST", "/resume", timeout_s)

    def connect(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Make the workers ready for a transport: join its process group, for example."""
        body = {"init_info": {"message": dict(message)}}
        self._call("POST", "/init_weight_transfer_engine", timeout_s, body)

    def start_update(self, timeout_s: float) -> None:
        """Begin an update; the server must be paused, and `finish_update` must follow before `resume`."""
        self._call("POST", "/start_weight_update", timeout_s)

    def update(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Load one bucket. After an error the update has to be started again."""
        self._call("POST", "/update_weights", timeout_s, {"update_info": {"message": dict(message)}})

    def finish_update(self, version: int, timeout_s: float) -> None:
        """Complete the update; tokens carry `version` from now on."""
        self._call("POST", "/finish_weight_update", timeout_s, {"weight_version": str(version)})

    def set_version(self, version: int, timeout_s: float) -> None:
        """Call the weights that are served `version` from now on."""
        self._call("POST", "/update_weight_version", timeout_s, {"new_version": str(version)})

    # ------------------------------------------------------------------ memory

    def sleep(self, timeout_s: float, level: int = 2) -> None:
        """Give the device's memory back: keys and values, and the weights (level 1 keeps those in host memory)."""
        self._call("POST", f"/sleep?level={level}", timeout_s)

    def wake(self, timeout_s: float) -> None:
        """Take the device's memory again."""
        self._call("POST", "/wake_up", timeout_s)

    # ------------------------------------------------------------------ HTTP

    def _call(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None, *, watch: bool = True
    ) -> dict[str, Any]:
        start = time.monotonic()
        what = f"{method} {path.partition('?')[0]}"
        if timeout_s <= 0:
            raise SilentError(f"server {self.name} was given no time for {what}; raise vllm.update_timeout_s")
        make = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = make(self._host, self._port, timeout=timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, payload, self._headers)
            if watch:
                self._wait(connection, what, start + timeout_s, timeout_s)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(what, error, timeout_s) from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            reason = describe_error(content)
            message = f"server {self.name} answered {what} with {response.status}: {reason}"
            raise RefusedError(message, response.status, reason)
        try:
            answer = json.loads(content) if content else {}
        except ValueError:
            message = f"server {self.name} answered {what} with something else than JSON; is it vLLM?"
            raise RefusedError(message, response.status, "no JSON") from None
        return answer if isinstance(answer, dict) else {"answer": answer}

    def _wait(self, connection: http.client.HTTPConnection, what: str, deadline: float, timeout_s: float) -> None:
        sock = connection.sock
        # not select.select, which refuses the numbers that files get beside a thousand requests in flight
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        looks = 0
        while not poll.poll(1000 * max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            looks += 1
            # Most calls take less than two looks; a health check costs a connection.
            if looks % 4 == 0:
                self._check_alive(what, min(_HEALTH_S, left))
        sock.settimeout(max(0.001, deadline - time.monotonic()))

    def _check_alive(self, what: str, timeout_s: float) -> None:
        try:
            self.health(timeout_s)
        except (OpenFilesError, SilentError):
            # one that is merely busy does not answer in time; a dead one refuses, or says 503
            return
        except EngineError:
            raise EngineDiedError(f"server {self.name} died during {what}; look at its log") from None

    def _unreachable(self, what: str, error: Exception, timeout_s: float) -> EngineError:
        if is_out_of_files(error):
            return OpenFilesError(f"server {self.name}: {what}")
        if isinstance(error, TimeoutError):
            return SilentError(f"server {self.name} did not answer {what} in time ({timeout_s:.1f} s); look at its log")
        why = str(error) or type(error).__name__
        return EngineDiedError(f"server {self.name} is not reachable for {what} ({why}); is it running?")


def describe_error(content: bytes) -> str:
    """Find the reason in the body of a failed call, in one line."""
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text
    if isinstance(answer, dict):
        found = answer.get("error", answer.get("detail", answer.get("message", text)))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    line = " ".join(text.split()).removeprefix(_WRAPPING)
    return line[:_LONGEST_REASON] or "no reason given"
