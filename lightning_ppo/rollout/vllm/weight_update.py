"""A refit: the same steps on all servers, which go on together or not at all."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket, join
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.incoming import ABANDON
from lightning_ppo.refit.transport import Lanes, WeightTransport, remaining
from lightning_ppo.rollout.vllm.control import Control, RefusedError

_ABANDON_S = 2.0

Failures = dict[str, EngineError]
"""What went wrong, by the name of the server's control."""


class WeightUpdate:
    """Brings weights to servers, and keeps the host copy that a server gets which comes up later.

    Attributes:
        is_torn: Whether the last update ended with an exception after servers had begun.
    """

    def __init__(
        self, transport: WeightTransport, dtype: torch.dtype, bucket_bytes: int, timeout_s: float, *, clear_cache: bool
    ) -> None:
        """Nothing is sent yet.

        Args:
            transport: The way that buckets take.
            dtype: Precision of the servers.
            bucket_bytes: Largest number of bytes in a bucket.
            timeout_s: Deadline of an update, from its begin until every server goes on.
            clear_cache: Whether keys and values of the old weights are forgotten.
        """
        self._transport = transport
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._clear_cache = clear_cache
        self._host: HostWeights | None = None
        self.is_torn = False

    @property
    def version(self) -> int | None:
        """Policy version of the host copy; None while it holds no complete policy."""
        return None if self._host is None else self._host.version

    def update(self, controls: Sequence[Control], weights: Iterable[tuple[str, Tensor]], version: int) -> Failures:
        """Make servers serve new weights. All of them are held while any of them loads.

        Args:
            controls: The servers.
            weights: A whole state dict.
            version: The policy version it is.

        Returns:
            Which servers do not serve this version, and why. They stay held: half an update is no policy.

        Raises:
            EngineError: the weights are not those of the first update, or cannot be sent at all. With `is_torn` the
                servers had begun and stay held; otherwise they go on with the old weights.
        """
        if self._host is None:
            pairs = list(weights)
            self._host = HostWeights.of(pairs, self._dtype, self._bucket_bytes)
            weights = pairs
        host = self._host
        try:
            return self._send(host, host.fill(weights, version), controls, version)
        except BaseException:
            # It may be complete by now, but no server has it: nor must one get it later.
            host.version = None
            raise

    def push(self, control: Control) -> None:
        """Give one server the current weights.

        Raises:
            EngineError: there are none, or the server did not take them.
        """
        host = self._host
        if host is None or host.version is None:
            raise EngineError(f"server {control.name} cannot get weights: the last update was not completed")
        failures = self._send(host, iter(host.buckets), [control], host.version)
        for error in failures.values():
            raise error

    def resend(self, controls: Sequence[Control], version: int) -> Failures:
        """Give servers the weights of the last update again, as a new version: they lost them in their sleep.

        Returns:
            As `update`.

        Raises:
            EngineError: there are no weights yet.
        """
        host = self._complete_host()
        host.version = version
        return self._send(host, iter(host.buckets), controls, version)

    def announce(self, controls: Sequence[Control], version: int) -> Failures:
        """Call unchanged weights by a new version; requests are not held.

        Returns:
            Which servers did not hear of it, and why.

        Raises:
            EngineError: there are no weights yet.
        """
        self._complete_host().version = version
        deadline = time.monotonic() + self._timeout_s
        return _on_all(controls, lambda control: control.set_version(version, remaining(deadline)))

    def revert(self, version: int | None) -> None:
        """The last update did not become current: the host copy is of `version`; None if no server must get it."""
        if self._host is not None:
            self._host.version = version

    def close(self) -> None:
        """Give the host copy back, and whatever the transport holds; safe to call twice."""
        self._transport.close()
        if self._host is not None:
            self._host.close()
            self._host = None

    def _complete_host(self) -> HostWeights:
        if self._host is None or self._host.version is None:
            raise EngineError("weights=() is empty in the first update; send the whole state dict once")
        return self._host

    def _send(
        self, host: HostWeights, buckets: Iterable[Bucket], controls: Sequence[Control], version: int
    ) -> Failures:
        deadline = time.monotonic() + self._timeout_s
        source = iter(buckets)
        # Servers are held from the first complete bucket on, not while it is being copied.
        self.is_torn = False
        ready = list(islice(source, 1))
        self.is_torn = True
        try:
            failures = self._begin_all(controls, source, ready, deadline)
            going = [control for control in controls if control.name not in failures]
            coming = chain(join(ready, self._bucket_bytes), source)
            failures |= self._transport.send(host, coming, going, deadline)
            going = [control for control in controls if control.name not in failures]
            failures |= _on_all(going, lambda control: control.finish_update(version, remaining(deadline)))
        except BaseException:
            _abandon(controls)
            raise
        self.is_torn = False
        done = [control for control in controls if control.name not in failures]
        failures |= _on_all(done, lambda control: control.resume(remaining(deadline)))
        _abandon([control for control in controls if control.name in failures])
        return failures

    def _begin_all(
        self, controls: Sequence[Control], source: Iterator[Bucket], ready: list[Bucket], deadline: float
    ) -> Failures:
        begun: list[Control] = []

        def begin(control: Control) -> None:
            try:
                self._begin(control, deadline)
            finally:
                begun.append(control)

        with Lanes(controls) as lanes:
            lanes.submit(begin)
            # vLLM sleeps in every pause: time to copy some more.
            while len(begun) < len(controls) and (bucket := next(source, None)) is not None:
                ready.append(bucket)
        return lanes.failures

    def _begin(self, control: Control, deadline: float) -> None:
        control.pause(remaining(deadline), clear_cache=self._clear_cache)
        try:
            control.start_update(remaining(deadline))
        except RefusedError as error:
            if "already active" not in error.reason:
                raise
            # an earlier trainer, or an earlier update of ours, went away in the middle
            _abandon([control])
            control.start_update(remaining(deadline))


def _abandon(controls: Sequence[Control]) -> None:
    # The answer is an error by design; a server that does not even give that one is looked after by the fleet.
    _on_all(controls, lambda control: control.update(ABANDON, _ABANDON_S))


def _on_all(controls: Sequence[Control], call: Callable[[Control], None]) -> Failures:
    with Lanes(controls) as lanes:
        lanes.submit(call)
    return lanes.failures
