"""Weights in memory that two processes share: an unlinked file that both map."""

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.layout import FlatLayout, write_weights


class SharedWeights:
    """One flat buffer of weights; the trainer creates it, the engine attaches to its file descriptor.

    The file has no name, so nothing is left behind however the processes end.

    Attributes:
        layout: Where each tensor lies.
        fd: File descriptor of the buffer, to be handed to the other process.
        buffer: The buffer itself, as long as it is open.
        views: Tensors that share memory with the buffer, by name.
    """

    def __init__(self, layout: FlatLayout, fd: int) -> None:
        """Map `fd`, which must hold the layout's bytes; the object owns `fd` from now on."""
        self.layout = layout
        self.fd = fd
        self.buffer = mmap.mmap(fd, max(layout.num_bytes, 1))
        self.views: dict[str, Tensor] = layout.views(self.buffer)

    @classmethod
    def create(cls, weights: Iterable[tuple[str, Tensor]]) -> Self:
        """Make a buffer of the right size and write these weights into it.

        Raises:
            EngineError: no place for a file of that size, or a name comes twice.
        """
        pairs = list(weights)
        buffer = cls.reserve(FlatLayout.of(pairs))
        buffer.write(pairs)
        return buffer

    @classmethod
    def reserve(cls, layout: FlatLayout) -> Self:
        """Make a buffer for this layout, full of zeros.

        Raises:
            EngineError: no place for a file of that size.
        """
        return cls(layout, _new_file(max(layout.num_bytes, 1)))

    @classmethod
    def attach(cls, layout: FlatLayout, fd: int) -> Self:
        """Map a buffer that another process created.

        Raises:
            EngineError: the file is shorter than the layout says.
        """
        size = os.fstat(fd).st_size
        if size < max(layout.num_bytes, 1):
            os.close(fd)
            raise EngineError(f"shared memory={size} bytes is too short; its layout needs {layout.num_bytes} bytes")
        return cls(layout, fd)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite every tensor; see `write_weights` for what is rejected."""
        write_weights(self.views, weights)

    def close(self) -> None:
        """Give the memory back; safe to call twice. Views taken before stay valid until they are dropped."""
        self.views = {}
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buffer.close()
        except BufferError:
            # Somebody still holds a view: the mapping goes with the last one.
            return


def _new_file(num_bytes: int) -> int:
    problems = []
    for folder in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        if not Path(folder).is_dir():
            continue
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                _reserve(file.fileno(), num_bytes)
                return os.dup(file.fileno())
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise EngineError(f"weights={num_bytes} bytes find no place ({', '.join(problems)}); make room or set TMPDIR")


def _reserve(fd: int, num_bytes: int) -> None:
    # Writing to a mapped file without room behind it kills the process (SIGBUS); reserving fails politely instead.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)
