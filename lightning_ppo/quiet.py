"""Keeps messages away that a PPO run always causes and that ask for nothing. Each filter says why it is safe."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EXPECTED_WARNINGS = (
    # Both models stay in eval mode on purpose: dropout would make the training forward another policy than the sampled.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # Checkpoints are written at PPO step boundaries, whatever state the optimizers are in (CheckpointExclusion).
    r"Using ModelCheckpoint with manual optimization and every_n_train_steps",
    # Lightning 2.6.6 on torch 2.13: Lightning's own tree utilities use the old name.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Lightning 2.6.6 calls jsonargparse by names that jsonargparse 5 will drop.
    r"\s*(By default only one JsonargparseDeprecationWarning|``instantiate_classes`` was|skip_none parameter was)",
    # MonitorCheck says it shorter, with what may be meant.
    r"`ModelCheckpoint\(monitor=.*could not find the monitored key",
    # The module has a validation step, but validation prompts are optional.
    r"Total length of `(list|PromptBatches|CombinedLoader)` across ranks is zero",
    # Metrics of a PPO step are summed over the ranks before they are logged, and every rank validates all prompts.
    r"It is recommended to use `self\.log\('(advantage|critic|policy|rollout|step|throughput|time|val)/",
    # A resumed run writes its checkpoints into its own folder.
    r"The dirpath has changed from .* will be reloaded",
)

_EXPECTED_LOGS = (
    # Advertisements for other packages.
    "💡 Tip:",
    # Where the models and the engine compute is a setting; these lines come before anything of ours.
    "GPU available:",
    "TPU available:",
    # The run's own last line says it with the place of its files.
    "`Trainer.fit` stopped: `max_epochs=",
)

_LOAD_REPORT = "LOAD REPORT"
"""Heads transformers' table of keys. `models/load.py` rejects every missing key but the new value head's."""


class _DropExpected(logging.Filter):
    """Drops log records that start like one of `_EXPECTED_LOGS`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is logged."""
        return not record.getMessage().startswith(_EXPECTED_LOGS)


class _DropLoadReport(logging.Filter):
    """Drops transformers' load report."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is logged."""
        return _LOAD_REPORT not in record.getMessage()


def quiet_expected_warnings() -> None:
    """Silence what Lightning says about every PPO run. Safe to call twice; nothing else is silenced."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _DropExpected) for known in logger.filters):
            logger.addFilter(_DropExpected())


@contextmanager
def quiet_loading(*, show_bars: bool = False) -> Iterator[None]:
    """Load or write Hugging Face folders without transformers' load report, and without its bars unless asked for.

    Other warnings of transformers are shown. The caller has to check for missing keys itself.
    """
    from transformers.utils import logging as transformers_logging

    # transformers leaves it untyped
    hf_logging: Any = transformers_logging
    bars_were_on = hf_logging.is_progress_bar_enabled()
    logger = logging.getLogger("transformers.modeling_utils")
    drop = _DropLoadReport()
    if not show_bars:
        hf_logging.disable_progress_bar()
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
        if bars_were_on:
            hf_logging.enable_progress_bar()
