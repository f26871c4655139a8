"""What the command line prints: results on stdout, one line per fault on stderr, nothing of Lightning's chatter."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_ppo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    RolloutError,
    StepError,
    UpdateInProgressError,
)
from lightning_ppo.reporting import unknown_metric

SETTING_ERRORS = (ConfigError, DataError, CheckpointError, MisconfigurationException)
"""Something that was given cannot be used; exit code 2."""

RUN_ERRORS = (RewardError, EngineError, RolloutError, StepError, UpdateInProgressError, OSError)
"""The run failed; exit code 1."""

_NO_METRIC = re.compile(
    r"`(?P<callback>\w+)\(monitor='(?P<monitor>[^']+)'\)` could not find the monitored key in the returned metrics: "
    r"\[(?P<known>[^]]+)\]"
)
"""What Lightning's ModelCheckpoint says after a validation without its metric."""


def say(text: str) -> None:
    """Print a result, on rank 0."""
    if _rank() == 0:
        print(text, flush=True)


def complain(text: str) -> None:
    """Print one line to stderr, on rank 0."""
    if _rank() == 0:
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def fail_setting(error: BaseException) -> int:
    """Say what cannot be used; every rank finds the same fault, rank 0 says so.

    Returns:
        The exit code.
    """
    text = str(error)
    if metric := _NO_METRIC.match(text):
        # Lightning names all of some fifty
        text = unknown_metric(metric["callback"], metric["monitor"], re.findall("'([^']+)'", metric["known"]))
    complain(f"error: {text}")
    return 2


def fail_run(error: object, log_file: object) -> int:
    """Say why the run failed, on every rank, and where the traceback is.

    Returns:
        The exit code.
    """
    rank = _rank()
    who = "error" if rank == 0 else f"error (rank {rank})"
    where = "" if log_file is None else f" (traceback in {log_file})"
    print(" ".join(f"{who}: {error}{where}".split()), file=sys.stderr, flush=True)
    return 1


def parameter_count(model: Any) -> str:
    """Count a model's parameters, to three digits."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return str(count)


def _rank() -> int:
    # Lightning sets it when it is imported, and again when ranks are known
    return int(getattr(rank_zero_only, "rank", 0))


@contextmanager
def lightning_warns_only() -> Iterator[None]:
    """Keep Lightning's INFO lines off the console; `RunLog` writes them to the run's file."""
    handlers = [
        handler
        for name in ("lightning", "lightning.pytorch", "lightning.fabric")
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)
