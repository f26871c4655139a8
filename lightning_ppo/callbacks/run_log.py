"""RunLog: the package's log lines, and the traceback of a failure, in the run's folder."""

import logging
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

log = logging.getLogger("lightning_ppo")

_SOURCES = ("lightning_ppo", "lightning.pytorch", "lightning.fabric")
"""Loggers whose records at INFO and above go to the file."""


class RunLog(Callback):
    """Writes `train.log` into the logger's folder: log lines of this package and of Lightning, tracebacks.

    Rank r > 0 writes `train_rank<r>.log`. Without a logger nothing is written.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        """The file, once the run has begun."""
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(trainer)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(trainer)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._handler is None:
            return
        stopped = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        log.error("stopped by %s", type(exception).__name__, exc_info=None if stopped else exception)
        self._close()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _open(self, trainer: L.Trainer) -> None:
        # asked on every rank, because Lightning agrees on the folder with a broadcast
        folder = trainer.log_dir if trainer.loggers else None
        if self._handler is not None or folder is None:
            return
        rank = trainer.global_rank
        self.path = Path(folder) / ("train.log" if rank == 0 else f"train_rank{rank}.log")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(self.path, encoding="utf-8")
        self._handler.setLevel(logging.INFO)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for name in _SOURCES:
            logging.getLogger(name).addHandler(self._handler)
        self._level = log.level
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)

    def _close(self) -> None:
        if self._handler is None:
            return
        for name in _SOURCES:
            logging.getLogger(name).removeHandler(self._handler)
        self._handler.close()
        self._handler = None
        log.setLevel(self._level)
