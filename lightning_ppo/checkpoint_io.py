"""WholeCheckpointIO: checkpoint files that are whole or not there, and that are checked before anything is loaded."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_ppo.checkpoint import check_is_ours, not_a_file
from lightning_ppo.errors import CheckpointError


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so that a kill leaves the old file or the new one, never half a file.

    Lightning's own writes into the temporary folder and moves. Where that is another file system, the move is a copy,
    and a kill within it leaves a torn file in the place of the last checkpoint. Remote paths are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        # one name per target: what a killed run left is overwritten
        part = local.with_name(f".{local.name}.part")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, local)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(local.parent)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint after every part of it was compared with its CRC-32, which `torch.load` does not do.

        Raises:
            CheckpointError: the file is cut off or damaged, a folder, or no checkpoint of a run of this package.
            FileNotFoundError: there is no such file.
        """
        local = _local(path)
        if local is not None and local.is_dir():
            raise not_a_file(local)
        if local is not None and local.is_file():
            _check(local)
        content = super().load_checkpoint(path, map_location, weights_only)
        # before Lightning looks for its own entries
        check_is_ours(content, path)
        return content


def _local(path: _PATH) -> Path | None:
    system = get_filesystem(path)
    return Path(system._strip_protocol(str(path))) if "file" in system.protocol else None


def _check(path: Path) -> None:
    # a short or foreign file makes zipfile raise whatever its bytes happen to mean
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _damaged(path, f"{error}") from error
    if part is not None:
        raise _damaged(path, f"{part} has another checksum")


def _damaged(path: Path, what: str) -> CheckpointError:
    what = " ".join(what.split())
    return CheckpointError(f"ckpt_path={path} is cut off or damaged ({what}); resume from an earlier checkpoint")


def _sync_folder(folder: Path) -> None:
    # the new name itself; not every file system lets a folder be synchronised
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        return
    finally:
        os.close(handle)
