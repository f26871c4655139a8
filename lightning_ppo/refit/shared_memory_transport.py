"""Weights through memory that trainer and servers share: one host, no copy in between."""

import os
from collections.abc import Iterable, Sequence

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.transport import Lanes, Receiver, loading


class SharedMemoryTransport:
    """Servers map the trainer's host copy itself, through `/proc/<pid>/fd/<fd>`.

    The file behind it has no name, so that nothing is left behind however the processes end. Trainer and servers must
    run on one host, in one process namespace, as one user.
    """

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        status = os.fstat(weights.fd)
        place = {"pid": os.getpid(), "fd": weights.fd, "device": status.st_dev, "inode": status.st_ino}
        with Lanes(receivers) as lanes:
            for bucket in buckets:
                lanes.submit(loading({"kind": "shared_memory", **place, **bucket.to_message()}, deadline))
        return lanes.failures

    def close(self) -> None:
        """There is nothing to leave behind."""
