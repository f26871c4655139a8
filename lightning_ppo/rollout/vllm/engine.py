"""The vLLM engine as the trainer and the collector use it."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest, PolicySpec, check_request
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.control import Control, is_healed_by_restart
from lightning_ppo.rollout.vllm.devices import uses_cuda
from lightning_ppo.rollout.vllm.dispatch import Dispatcher
from lightning_ppo.rollout.vllm.examine import examine
from lightning_ppo.rollout.vllm.fleet import Fleet, Progress
from lightning_ppo.rollout.vllm.generation import GenerationClient
from lightning_ppo.rollout.vllm.launch import Command, Launcher, SubprocessLauncher, check_cores
from lightning_ppo.rollout.vllm.member import Member
from lightning_ppo.rollout.vllm.server_arguments import ServerCommand
from lightning_ppo.rollout.vllm.sleep import Sleep
from lightning_ppo.rollout.vllm.transports import make_transport
from lightning_ppo.rollout.vllm.weight_update import WeightUpdate

_log = logging.getLogger(__name__)

_COOLEST = 0.01
"""vLLM raises lower temperatures to this one, short of 0."""


class VLLMEngine:
    """Generation by vLLM servers; see `lightning_ppo.rollout.engine.Engine`.

    `generate` and `probe` may be called from any number of tasks and event loops; `start`, `update_weights`, `sleep`,
    `wake` and `close` block and belong to one thread at a time.

    Attributes:
        fleet: The servers, once started.
    """

    def __init__(
        self,
        config: VLLMConfig,
        log_folder: Path | None = None,
        recompute_kv_cache: bool = True,
        on_progress: Progress | None = None,
        *,
        can_sleep: bool = False,
        make_launcher: Callable[[Command], Launcher] | None = None,
        is_here: bool | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            config: Settings.
            log_folder: Folder of the servers' logs; None keeps them in temporary files without names.
            recompute_kv_cache: Whether keys and values of old weights are dropped after an update.
            on_progress: Called while servers come up; see `Fleet.start`.
            can_sleep: Whether servers on GPUs are started so that `sleep` gives memory back.
            make_launcher: Who starts servers, given their command; None means subprocesses of this machine.
            is_here: Whether all servers run on this machine; None means that those we start do.

        Raises:
            ConfigError: this machine lacks one of `config.cores`.
        """
        if not config.is_external and make_launcher is None:
            check_cores(config.cores)
        self.fleet: Fleet[Control] | None = None
        self._config = config
        self._log_folder = log_folder
        self._on_progress = on_progress
        self._can_sleep = can_sleep
        self._is_here = not config.is_external if is_here is None else is_here
        self._make_launcher = make_launcher or (lambda command: SubprocessLauncher(config, command, log_folder))
        self._client = GenerationClient(config.request_timeout_s, config.api_key)
        self._recompute_kv_cache = recompute_kv_cache
        self._weights: WeightUpdate | None = None
        self._sleep: Sleep | None = None
        self._context = self._vocab_size = 0
        self._weights_are_gone = self._closed = False

    # ------------------------------------------------------------------ life

    @property
    def restarts(self) -> int:
        """Restarts of servers so far, failed ones included."""
        return 0 if self.fleet is None else self.fleet.restarts

    def start(self, spec: PolicySpec) -> None:
        """Start the servers, or reach those of `config.urls`, and block until they can take weights.

        Raises:
            EngineError: it was started or closed before; the transport cannot work on this machine; a server did not
                come up within `config.start_timeout_s`; or it does not fit this run (see `examine`).
        """
        if self.fleet is not None or self._closed:
            raise EngineError("engine=vllm was started or closed before; make a new VLLMEngine")
        config = self._config
        self._context, self._vocab_size = spec.max_context_tokens, int(json.loads(spec.config_json)["vocab_size"])
        self._weights = WeightUpdate(
            make_transport(config, is_here=self._is_here),
            getattr(torch, config.dtype),
            config.bucket_bytes,
            config.update_timeout_s,
            clear_cache=self._recompute_kv_cache,
        )
        try:
            launcher = None
            if not config.is_external:
                launcher = self._make_launcher(ServerCommand.of(config, spec, can_sleep=self._can_sleep))
            self.fleet = Fleet(config, launcher, partial(Control, api_key=config.api_key), self._push)
            self._sleep = Sleep(self.fleet, config.update_timeout_s, frees_memory=self._frees_memory)
            self.fleet.start(self._on_progress)
            for member in self.fleet.members():
                member.control.name = str(member)
                examine(member.control, spec, config.dtype, config.update_timeout_s)
        except BaseException:
            self.close()
            raise

    def check_health(self) -> None:
        """Return if a server serves or may serve again.

        Raises:
            EngineDiedError: none will; it names them, with the last lines of their logs.
            EngineError: it was never started.
        """
        self._running().check_health()

    def describe(self) -> str:
        """Name every server and its state."""
        return "no vLLM server was started" if self.fleet is None else self.fleet.describe()

    def close(self) -> None:
        """Stop our servers and fail what is still pending; safe to call twice and after a failure."""
        if self._closed:
            return
        self._closed = True
        if self.fleet is not None:
            self.fleet.close()
        self._client.close()
        if self._weights is not None:
            self._weights.close()

    # ------------------------------------------------------------------ generation

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response; a request whose server fails goes to another one. Cancelling aborts it.

        Raises:
            EngineError: there are no weights yet; the request is out of range, or was refused; or several servers in
                turn failed it.
            EngineDiedError: no server will serve any more.
        """
        return await self._ready(request).generate(request)

    async def probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        """Sample the same response from every server that serves; if none does, from the first one that does again.

        Returns:
            The answer of each server, by its name. A server that dies meanwhile is left out: it does not serve.

        Raises:
            EngineError: as `generate`.
        """
        return await self._ready(request).probe(request)

    # ------------------------------------------------------------------ weights and memory

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Make every serving server serve these weights as `version`; requests in flight are held meanwhile, and go on.

        A server that fails is taken out of service until it has the current version; the log says which, and why.

        Args:
            weights: Hugging Face names and tensors of a whole state dict. Every update carries the same names and
                shapes. Empty: only the version changes.
            version: The policy version they are.

        Raises:
            EngineError: the tensors are not those of the policy or of the first update; or no server took them, though
                at least one answers (or, the first time and for `config.urls`, is alive). The message names each server
                and its reason.
        """
        fleet, refit = self._running(), self._refit
        pairs = iter(weights)
        first = next(pairs, None)
        with fleet.update(version) as members:
            for member in members:
                member.control.name = str(member)
            before = refit.version if first is None else None
            try:
                self._update_all(fleet, members, None if first is None else _chain(first, pairs), version)
            except BaseException:
                # what did not become current must not be given to a server that comes up later
                refit.revert(before)
                raise

    def sleep(self) -> None:
        """Hold the servers, and on a GPU give its memory back, until `wake`. Without effect if it sleeps.

        A server that does not obey is taken out of service, and no server is restarted before `wake`.

        Raises:
            EngineError: see `lightning_ppo.rollout.vllm.sleep.Sleep.begin`; or it is not running.
        """
        self._running()
        if self._sleep is not None and not self._sleep.is_on:
            self._weights_are_gone = self._frees_memory
            self._sleep.begin()

    def wake(self) -> None:
        """Go on; on a GPU `update_weights` must follow before the next request. Without effect if awake.

        Raises:
            EngineError: no server wakes up within `config.update_timeout_s`, though one is alive.
        """
        if self._sleep is not None and self._sleep.is_on:
            self._running()
            self._sleep.end()

    # ------------------------------------------------------------------ parts

    @property
    def _frees_memory(self) -> bool:
        return self._can_sleep and uses_cuda(self._config)

    @property
    def _refit(self) -> WeightUpdate:
        if self._weights is None:
            raise EngineError("engine=vllm is not running; call start first")
        return self._weights

    def _update_all(
        self,
        fleet: Fleet[Control],
        members: Sequence[Member[Control]],
        weights: Iterable[tuple[str, Tensor]] | None,
        version: int,
    ) -> None:
        refit = self._refit
        controls = [member.control for member in members]
        if weights is not None:
            try:
                failures = refit.update(controls, weights, version)
            except BaseException:
                if refit.is_torn:
                    for member in members:
                        member.version = None
                raise
        elif self._weights_are_gone:
            failures = refit.resend(controls, version)
        else:
            failures = refit.announce(controls, version)
        for member in members:
            failed = member.control.name in failures
            member.version = None if failed else version
            if failed:
                _log.warning("vLLM does not serve policy version %d: %s", version, failures[member.control.name])
        reasons = "; ".join(str(error) for error in failures.values())
        # in the first update the limit is too short instead
        hangs_too = fleet.version is not None and not self._config.is_external
        has_refused = not all(is_healed_by_restart(error, hangs_too=hangs_too) for error in failures.values())
        if len(failures) == len(members) and has_refused:
            raise EngineError(f"no vLLM server serves policy version {version}: {reasons}")
        self._weights_are_gone = False

    def _push(self, member: Member[Control]) -> None:
        member.control.name = str(member)
        self._refit.push(member.control)

    def _ready(self, request: GenerationRequest) -> Dispatcher:
        fleet = self._running()
        if fleet.version is None:
            raise EngineError("engine=vllm has no weights yet; call update_weights first")
        check_request(request, self._context, self._vocab_size)
        if 0 < request.sampling.temperature < _COOLEST:
            raise EngineError(
                f"temperature={request.sampling.temperature} is raised to {_COOLEST} by vLLM, so that log-probs cannot"
                f" agree; set 0 or at least {_COOLEST}"
            )
        return Dispatcher(fleet, self._client)

    def _running(self) -> Fleet[Control]:
        if self._closed:
            raise EngineDiedError("the vLLM engine is closed")
        if self.fleet is None:
            raise EngineError("engine=vllm is not running; call start first")
        return self.fleet


def _chain(first: tuple[str, Tensor], rest: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    yield first
    yield from rest
