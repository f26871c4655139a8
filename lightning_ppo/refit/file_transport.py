"""Weights through files in a folder that trainer and servers share: any hosts, no rendezvous."""

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.transport import Lanes, Receiver, loading


class FileTransport:
    """One safetensors file per bucket, in a folder of this run's own; files go once all servers have read them."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet.

        Args:
            folder: The shared folder.
        """
        self._folder = folder / f"lightning_ppo-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._count = 0

    def send(
        self, weights: HostWeights, buckets: Iterable[Bucket], receivers: Sequence[Receiver], deadline: float
    ) -> dict[str, EngineError]:
        """See `WeightTransport.send`."""
        self._count += 1
        written: list[Path] = []
        try:
            with Lanes(receivers) as lanes:
                for bucket in buckets:
                    path = self._write(weights, bucket)
                    written.append(path)
                    lanes.submit(loading({"kind": "file", "path": str(path)}, deadline))
            return lanes.failures
        finally:
            for path in written:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the run's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, weights: HostWeights, bucket: Bucket) -> Path:
        path = self._folder / f"update{self._count}-bucket{bucket.index}.safetensors"
        hidden = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(weights.tensors(bucket), hidden)
            # A reader sees the whole file or none.
            hidden.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                hidden.unlink()
            why = getattr(error, "strerror", None) or str(error)
            raise EngineError(
                f"transfer_folder={self._folder.parent} cannot take {path.name} ({why}); make room or set another"
            ) from None
        return path
