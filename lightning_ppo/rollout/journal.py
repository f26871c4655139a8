"""The journal: finished prompt groups appended to the run's folder, so that a kill between checkpoints loses none.

One file per writer and PPO step, `step_000012.bin`; writers after the first (resumed runs in the same folder) add their
number, `step_000012_r1.bin`. A file belongs to the writer that made it, also of two that began at once with the same
number: whoever comes second takes the next one. A file starts with magic "LPRJ" | format u32;
then come frames. The first holds JSON {"fingerprint", "lineage"}, every other one a group (`group_codec`)::

    frame: payload bytes u32 | crc32 u32 of the payload | crc32 u32 of these two numbers | payload

The crc of a frame's own numbers tells a record that a kill cut off (tolerated) from damage (refused).

Which policy a version number names depends on the run: two runs resumed from the same checkpoint train different
policies 7. A lineage is a list of [writer, last version before the next writer took over or None], so that every
version number has an owner. A record counts for a checkpoint only if both give its newest version the same owner.
"""

import json
import logging
import os
import re
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import CheckpointError, RolloutError
from lightning_ppo.rollout.group_codec import decode_group, encode_group
from lightning_ppo.rollout.prompts import PromptSet

_log = logging.getLogger(__name__)

FORMAT = 1
_MAGIC = b"LPRJ"
_HEADER = struct.Struct("<4sI")
_NUMBERS = struct.Struct("<II")
_U32 = struct.Struct("<I")
_FRAME_START = _NUMBERS.size + _U32.size
_NAME = re.compile(r"step_(\d{6,})(?:_r(\d+))?\.bin")

Lineage = list[list[Any]]
"""[[writer id, last policy version that it owns or None], ...], oldest writer first; plain values for a checkpoint."""


class Journal:
    """Writes the journal of one run. Thread-safe.

    Args:
        directory: `journal` in the run's folder; made with the first record.
        fingerprint: Of the data set, the seed of the run and what else must agree for groups to be used again.
        keep: Never delete anything (`record_rollouts`).
    """

    def __init__(self, directory: Path, fingerprint: str, keep: bool) -> None:
        self._directory = Path(directory)
        self._fingerprint = fingerprint
        self._keep = keep
        self._number = self._earlier = _next_number(self._directory)
        """The second one stays: runs with lower numbers were there before, those with others go on beside this one."""
        self._own: set[Path] = set()
        self._id = uuid.uuid4().hex
        self._lineage: Lineage = [[self._id, None]]
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._step = -1

    @property
    def lineage(self) -> Lineage:
        """Who owns which policy version; belongs into the checkpoint, `read` and `fork` take it back."""
        return [list(entry) for entry in self._lineage]

    def append(self, group: PromptGroup, ppo_step: int) -> None:
        """Append a finished group: one `write`, visible to every process at once, also if this one is killed.

        Args:
            group: What was committed.
            ppo_step: The step that the trainer is in; decides on the file.

        Raises:
            RolloutError: the file cannot be written; it ends with its last whole record then.
            ValueError: see `encode_group`.
        """
        frame = _frame(encode_group(group))
        with self._lock:
            self._write(frame, ppo_step)

    def fork(self, groups: Iterable[PromptGroup], ppo_step: int, parent: Lineage, version: int) -> None:
        """Start a resumed run's journal with what it kept; then drop the journal of earlier writers (unless `keep`).

        Args:
            groups: Ready groups of the restored run; before anything is appended.
            ppo_step: The step that it starts with.
            parent: The checkpoint's lineage; empty if it has none.
            version: The restored policy version, the last one that `parent` owns.

        Raises:
            RolloutError: the files cannot be written.
        """
        # A parent without a journal still owns its versions, under a name that no other run knows.
        owned = [list(entry) for entry in parent] or [[uuid.uuid4().hex, None]]
        owned = [entry for index, entry in enumerate(owned) if index == 0 or owned[index - 1][1] < version]
        owned[-1][1] = version if owned[-1][1] is None else min(version, owned[-1][1])
        self._lineage = [*owned, [self._id, None]]
        for group in groups:
            self.append(group, ppo_step)
        if not self._keep:
            for writer, _, path in _files(self._directory):
                if writer < self._earlier:
                    path.unlink(missing_ok=True)

    def trim(self, before_step: int) -> None:
        """Delete the files of steps before `before_step`: a checkpoint on disk holds what they hold (unless `keep`)."""
        if self._keep:
            return
        with self._lock:
            if self._step < before_step:
                self._close()
            for _, step, path in _files(self._directory):
                if step < before_step:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the open file; safe to call twice, and `append` may follow."""
        with self._lock:
            self._close()

    @staticmethod
    def read(
        directory: Path,
        fingerprint: str,
        prompts: PromptSet,
        row_of: Callable[[int], int],
        lineage: Lineage | None = None,
    ) -> list[PromptGroup]:
        """Read all whole records, oldest first; a draw may stand there several times.

        Args:
            directory: As for `Journal`; need not exist.
            fingerprint: As for `Journal`.
            prompts: The data set.
            row_of: The row that a draw stands for (`PromptStream.row_of`); groups of another row are left out.
            lineage: The checkpoint's; groups whose newest policy version belongs to another run are left out, and files
                of runs that have nothing to do with it. None takes every group of every file.

        Raises:
            CheckpointError: a file has another fingerprint or format, or is damaged anywhere but at its cut-off end.
        """
        found, misplaced = [], 0
        for _, _, path in _files(Path(directory)):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error}); make it readable, or delete it") from error
            written: Lineage | None = None
            for payload in _payloads(path, data):
                if written is None:
                    header = json.loads(payload)
                    written = header["lineage"]
                    if lineage is not None and not _writers(written) & _writers(lineage):
                        break
                    _check_fingerprint(path, header, fingerprint)
                    continue
                try:
                    group = decode_group(payload, prompts)
                except CheckpointError as error:
                    raise CheckpointError(f"{path}: {error}") from error
                if lineage is not None and _owner(written, group) != _owner(lineage, group):
                    continue
                if group.prompt.row != row_of(group.draw):
                    misplaced += 1
                    continue
                found.append(group)
        if misplaced:
            _log.warning("%s: %d groups of other prompts than their draws' are left out", directory, misplaced)
        return found

    def _write(self, record: bytes, ppo_step: int) -> None:
        try:
            if self._file is None or ppo_step != self._step:
                self._close()
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = self._open(ppo_step)
                self._step = ppo_step
            size = self._file.seek(0, os.SEEK_END)
            data = record if size else self._header() + record
            if self._file.write(data) != len(data):
                # a later record behind half a record would read as damage
                self._file.truncate(size)
                raise OSError("the device is full")
        except OSError as error:
            raise RolloutError(
                f"journal={self._directory} cannot be written ({error}); free some space, or set journal=False"
            ) from error

    def _open(self, ppo_step: int) -> FileIO:
        while True:
            suffix = f"_r{self._number}" if self._number else ""
            path = self._directory / f"step_{ppo_step:06d}{suffix}.bin"
            try:
                file = FileIO(path, "a" if path in self._own else "x")
            except FileExistsError:
                # another run began in this folder at the same moment
                self._number = _next_number(self._directory)
                continue
            self._own.add(path)
            return file

    def _header(self) -> bytes:
        text = json.dumps({"fingerprint": self._fingerprint, "lineage": self._lineage}).encode()
        return _HEADER.pack(_MAGIC, FORMAT) + _frame(text)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _owner(lineage: Sequence[Sequence[Any]], group: PromptGroup) -> str | None:
    newest = group.newest_version
    return next((writer for writer, last in lineage if last is None or newest <= last), None)


def _files(directory: Path) -> list[tuple[int, int, Path]]:
    """Return (writer, step, path) of every file, in the order in which they were written."""
    names = ((path, _NAME.fullmatch(path.name)) for path in directory.glob("step_*.bin"))
    return sorted((int(match[2] or 0), int(match[1]), path) for path, match in names if match)


def _next_number(directory: Path) -> int:
    return max((writer for writer, _, _ in _files(directory)), default=-1) + 1


def _writers(lineage: Lineage) -> set[str]:
    return {writer for writer, _ in lineage}


def _frame(payload: bytes) -> bytes:
    numbers = _NUMBERS.pack(len(payload), zlib.crc32(payload))
    return b"".join((numbers, _U32.pack(zlib.crc32(numbers)), payload))


def _payloads(path: Path, data: bytes) -> Iterable[bytes]:
    if len(data) < _HEADER.size:
        return
    magic, version = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged(path, 0)
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, not {FORMAT}; delete it, or set restore=none")
    begin = _HEADER.size
    while begin <= len(data) - _FRAME_START:
        size, crc = _NUMBERS.unpack_from(data, begin)
        if zlib.crc32(data[begin : begin + _NUMBERS.size]) != _U32.unpack_from(data, begin + _NUMBERS.size)[0]:
            raise _damaged(path, begin)
        start = begin + _FRAME_START
        if start + size > len(data):
            return
        payload = data[start : start + size]
        if zlib.crc32(payload) != crc:
            raise _damaged(path, begin)
        yield payload
        begin = start + size


def _check_fingerprint(path: Path, header: Mapping[str, Any], fingerprint: str) -> None:
    if header["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} is the journal of other prompts, seed or settings; use another folder, or set restore=none"
        )


def _damaged(path: Path, place: int) -> CheckpointError:
    return CheckpointError(f"{path} is damaged at byte {place}; delete it, or set restore=none")
