"""Weights through files in a folder that trainer and servers share: any hosts, no rendezvous."""

import contextlib
import fcntl
import logging
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

_PREFIX = f"lightning_ppo-{socket.gethostname()}-"

_log = logging.getLogger(__name__)


class FileTransport:
    """One safetensors file per bucket, in a folder of this run's own; files go once all servers have read them.

    What runs of this host have left, because they were killed, goes when the next one first writes.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet.

        Args:
            folder: The shared folder.
        """
        self._folder = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._lock: int | None = None
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
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Make the folder, locked for as long as this process lives."""
        parent = self._folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(parent)
        # nobody sees the folder before it is locked
        hidden = parent / f".{self._folder.name}"
        hidden.mkdir()
        self._unlock()
        self._lock = os.open(hidden, os.O_RDONLY)
        _lock(self._lock)
        hidden.rename(self._folder)

    def _write(self, weights: HostWeights, bucket: Bucket) -> Path:
        path = self._folder / f"update{self._count}-bucket{bucket.index}.safetensors"
        hidden = path.with_suffix(".part")
        try:
            if not self._folder.is_dir():
                self._claim()
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


def _remove_left_over(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # a container of the same name may have other processes; its lock is seen from here
        if not pid.isdecimal() or Path(f"/proc/{pid}").exists():
            continue
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                if _lock(handle):
                    _log.info("%s was left by a run that is gone; removed", folder)
                    shutil.rmtree(folder)
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Whether there is a lock now; not every shared file system can lock a folder."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
