"""The built-in engine as the trainer and the collector use it."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.refit.shared_memory import SharedWeights
from lightning_ppo.rollout.engine import Generation, GenerationRequest, PolicySpec, check_request
from lightning_ppo.rollout.local.channel import Channel
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.local.process import WorkerProcess
from lightning_ppo.rollout.local.protocol import Command, Ready, SetSleep, SetWeights, Start


class LocalEngine:
    """A generation engine in a process of its own on this machine; see `lightning_ppo.rollout.engine.Engine`.

    `generate` may be called from any number of tasks and event loops; `start`, `update_weights`, `check_health` and
    `close` block and belong to one thread at a time.

    Attributes:
        backend: `native` or `transformers`, once started.
    """

    def __init__(self, config: LocalEngineConfig, log_path: Path | None = None) -> None:
        """Nothing is started yet.

        Args:
            config: Settings.
            log_path: File the process's output is appended to; None keeps it in a temporary file without a name.
        """
        self.backend: str | None = None
        self._config = config
        self._log_path = log_path
        self._channel: Channel | None = None
        self._context = 0
        self._vocab_size = 0
        self._weights: SharedWeights | None = None
        self._has_weights = False
        self._is_torn = False
        """Whether an update failed half-way: the shared memory then holds parts of two policies."""
        self._asleep = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before `start`."""
        return None if self._channel is None else self._channel.pid

    @property
    def restarts(self) -> int:
        """Always 0: the death of its process ends the run."""
        return 0

    def start(self, spec: PolicySpec) -> None:
        """Start the process and block until it can take weights.

        Raises:
            EngineError: it was started or closed before, cannot serve this policy, or did not come up within
                `config.start_timeout_s`.
            EngineDiedError: it died on the way.
        """
        if self._channel is not None or self._closed:
            raise EngineError("engine=local was started or closed before; make a new LocalEngine")
        self._channel = Channel(WorkerProcess(self._config.num_threads, self._log_path))
        try:
            reply = self._channel.ask(
                Start(spec, self._config), "start_timeout_s", self._config.start_timeout_s, "come up"
            )
            if not isinstance(reply, Ready):
                raise EngineError(f"reply={reply} to Start is not Ready; both processes must run the same version")
        except BaseException:
            self.close()
            raise
        self.backend, self._vocab_size, self._context = reply.backend, reply.vocab_size, spec.max_context_tokens

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Cancelling the awaiting task aborts the request.

        Raises:
            EngineError: the engine has no weights yet or is asleep, the request leaves no room for a response, or it is
                out of range.
            EngineDiedError: the engine is gone.
        """
        channel = self._running()
        if not self._has_weights:
            raise EngineError("engine=local has no weights yet; call update_weights first")
        if self._asleep:
            raise EngineError("engine=local is asleep; call wake first")
        check_request(request, self._context, self._vocab_size)
        return await channel.generate(request)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve these weights as `version`; blocks until the engine does. Requests in flight continue.

        An engine that is asleep serves them from `wake` on.

        Args:
            weights: Hugging Face names and tensors of a whole state dict; of tied tensors one name is enough. Every
                update carries the same names, shapes and dtypes. Empty: only the version changes.
            version: The policy version they are.

        Raises:
            EngineError: the tensors are not those of the policy or of the first update (the engine then goes on with
                the old ones), or the engine did not confirm within `config.update_timeout_s` (it is then stopped).
            EngineDiedError: the engine is gone.
        """
        channel = self._running()
        channel.check_health()
        pairs = iter(weights)
        first = next(pairs, None)
        if first is None:
            if not self._has_weights:
                raise EngineError("weights=() is empty in the first update; send the whole state dict once")
            self._confirm(channel, SetWeights(version, None, changed=False))
        elif self._weights is not None:
            self._is_torn = True
            self._weights.write(itertools.chain([first], pairs))
            self._is_torn = False
            self._confirm(channel, SetWeights(version, None, changed=True))
        else:
            weights_buffer = SharedWeights.create(itertools.chain([first], pairs))
            try:
                self._confirm(channel, SetWeights(version, weights_buffer.layout, changed=True), fd=weights_buffer.fd)
            except BaseException:
                weights_buffer.close()
                raise
            self._weights = weights_buffer
            self._has_weights = True

    async def probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        """Sample the response, as the only replica; see `generate`."""
        return {"local": await self.generate(request)}

    def sleep(self) -> None:
        """Give the device's memory back until `wake`; nothing may be in flight. Without effect if it sleeps.

        Raises:
            EngineError: responses are in flight, the last update was incomplete (the engine stays awake in both cases),
                or the engine did not confirm within `config.update_timeout_s`.
            EngineDiedError: the engine is gone.
        """
        if not self._asleep:
            self._check_whole()
            self._confirm(self._running(), SetSleep(asleep=True), "free its memory")
            self._asleep = True

    def wake(self) -> None:
        """Take the device again, with the weights that were sent last. Without effect if it is awake.

        Raises:
            EngineError: the last update was incomplete, or the engine did not confirm within `config.update_timeout_s`.
            EngineDiedError: the engine is gone.
        """
        if self._asleep:
            self._check_whole()
            self._confirm(self._running(), SetSleep(asleep=False), "take its memory")
            self._asleep = False

    def check_health(self) -> None:
        """Return if the engine is alive.

        Raises:
            EngineDiedError: it is not; the message ends with the last lines of its log.
            EngineError: it was never started.
        """
        self._running().check_health()

    def describe(self) -> str:
        """Name its process."""
        return "local engine, not started" if self.pid is None else f"local engine (pid {self.pid})"

    def close(self) -> None:
        """Stop the process and fail what is still pending; safe to call twice and after a failure."""
        if self._closed:
            return
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        if self._weights is not None:
            self._weights.close()

    def _confirm(
        self, channel: Channel, command: Command, what: str = "confirm new weights", fd: int | None = None
    ) -> None:
        channel.ask(command, "update_timeout_s", self._config.update_timeout_s, what, fd)

    def _check_whole(self) -> None:
        if self._is_torn:
            raise EngineError("weights=incomplete since the last update failed; send the whole state dict first")

    def _running(self) -> Channel:
        if self._closed:
            raise EngineDiedError("local engine is closed")
        if self._channel is None:
            raise EngineError("engine=local is not running; call start first")
        return self._channel
