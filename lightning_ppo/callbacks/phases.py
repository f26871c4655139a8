"""The callbacks in charge of a phase of the PPO step: exactly one of each."""

from collections.abc import Sequence
from typing import TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_ppo.callbacks.checkpoint_exclusion import CheckpointExclusion
from lightning_ppo.callbacks.critic_epochs import CriticEpochs
from lightning_ppo.callbacks.critic_warmup import CriticWarmup
from lightning_ppo.callbacks.refit import WeightRefit
from lightning_ppo.errors import ConfigError
from lightning_ppo.validation import reject

AnyCallback = TypeVar("AnyCallback", bound=Callback)

PHASES = (WeightRefit, CriticEpochs, CheckpointExclusion, CriticWarmup)
"""One's own subclass stands in for the default if given."""


def missing_phases(present: Sequence[Callback]) -> list[Callback]:
    """Return defaults for the phases that no callback is in charge of.

    Raises:
        ConfigError: two are in charge of the same one.
    """
    missing: list[Callback] = []
    for kind in PHASES:
        count = sum(isinstance(callback, kind) for callback in present)
        if count > 1:
            raise ConfigError(f"trainer.callbacks={kind.__name__} is there {count} times; pass at most one")
        if count == 0:
            missing.append(kind())
    return missing


def phase_callback(trainer: L.Trainer, kind: type[AnyCallback]) -> AnyCallback:
    """Return the trainer's callback of this kind.

    Raises:
        ConfigError: there is none: a subclass of the module has a `configure_callbacks` of its own.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            return callback
    why = f"leaves the trainer without {kind.__name__}"
    raise reject("configure_callbacks", "your own", why, "add to what super().configure_callbacks() returns")
