"""The callbacks that every run has, beside those that were given."""

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_ppo.callbacks.mismatch import MismatchCheck
from lightning_ppo.callbacks.monitors import MonitorCheck
from lightning_ppo.callbacks.phases import missing_phases
from lightning_ppo.callbacks.samples import SampleTable


def default_callbacks(trainer: L.Trainer) -> list[Callback]:
    """Return what the trainer lacks: those in charge of a phase, checks, and with a logger the table of samples.

    Raises:
        ConfigError: two are in charge of the same phase.
    """
    present: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    missing = [*missing_phases(present), MonitorCheck(), MismatchCheck()]
    if trainer.loggers and not any(isinstance(callback, SampleTable) for callback in present):
        missing.append(SampleTable())
    return missing
