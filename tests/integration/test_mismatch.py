"""An engine whose log-probs are not the trainer's is said once, unless something explains or corrects it."""

import logging

import pytest

from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.testing import FakeEngine


def warnings_of(caplog):
    return [
        r.getMessage() for r in caplog.records if r.name.startswith("lightning_ppo") and r.levelno >= logging.WARNING
    ]


def test_an_engine_that_is_far_off(make_run, caplog):
    run = make_run(3, fake=FakeEngine())
    run.fit()
    (said,) = warnings_of(caplog)
    assert said.startswith("rollout/token_mult_prob_error=")
    assert float(said.split("=")[1].split(" ")[0]) > 1.05
    assert " in PPO step 0, where rollouts are fresh: " in said
    assert said.endswith("use an engine in float32, or set importance_correction=truncated")
    caplog.clear()
    run.trainer.fit_loop.max_epochs = 4
    run.fit()
    assert " in PPO step 3, " in warnings_of(caplog)[0], "every fit says it"


@pytest.mark.parametrize("settings", [{"importance_correction": "truncated"}, {"critic_warmup_steps": 2}])
def test_nothing_is_said_where_it_is_corrected_or_nothing_is_trained(make_run, caplog, settings):
    make_run(2, fake=FakeEngine(), ppo_settings=settings).fit()
    assert warnings_of(caplog) == []


def test_the_built_in_engine_agrees(make_run, caplog):
    make_run(2, fake=LocalEngine(LocalEngineConfig(slots=8))).fit()
    assert warnings_of(caplog) == []
