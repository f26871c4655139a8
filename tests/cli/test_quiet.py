"""Expected messages are silenced, others are not."""

import logging
import warnings

import pytest

from lightning_ppo.quiet import quiet_expected_warnings, quiet_loading

INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")


@pytest.fixture(autouse=True)
def _filters():
    before = list(INFO.filters)
    yield
    INFO.filters[:] = before


def test_expected_warnings_are_silent_and_others_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_expected_warnings()
        warnings.warn("Found 69 module(s) in eval mode at the start of training. This", stacklevel=1)
        warnings.warn("It is recommended to use `self.log('policy/loss', ..., sync_dist=True)` when", stacklevel=1)
        warnings.warn("It is recommended to use `self.log('mine', ..., sync_dist=True)` when", stacklevel=1)
        warnings.warn("Found something else in eval mode", stacklevel=1)
    assert [str(entry.message)[:40] for entry in caught] == [
        "It is recommended to use `self.log('mine",
        "Found something else in eval mode",
    ]


def test_expected_log_lines_are_silent_and_others_are_not(caplog):
    quiet_expected_warnings()
    quiet_expected_warnings()
    assert len(INFO.filters) == 1
    INFO.addHandler(caplog.handler)
    try:
        for message in (
            "💡 Tip: For seamless cloud logging",
            "GPU available: False, used: False",
            "Restored all states",
        ):
            INFO.warning(message)
    finally:
        INFO.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"Restored all states"}


def test_loading_hides_the_report_only_meanwhile():
    from transformers.utils import logging as hf_logging

    logger = logging.getLogger("transformers.modeling_utils")
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    bars = hf_logging.is_progress_bar_enabled()
    try:
        with quiet_loading():
            assert not hf_logging.is_progress_bar_enabled()
            logger.warning("Llama LOAD REPORT from: x")
            logger.warning("another one")
        logger.warning("Llama LOAD REPORT from: y")
    finally:
        logger.removeHandler(handler)
    assert seen == ["another one", "Llama LOAD REPORT from: y"]
    assert hf_logging.is_progress_bar_enabled() == bars
