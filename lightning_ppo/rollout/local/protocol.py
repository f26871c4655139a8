"""What the trainer's process and the engine's process say to each other: plain Python and numpy, no tensors."""

from dataclasses import dataclass

import numpy as np

from lightning_ppo.refit.layout import FlatLayout
from lightning_ppo.rollout.engine import GenerationRequest, PolicySpec
from lightning_ppo.rollout.local.config import LocalEngineConfig


@dataclass(frozen=True)
class Start:
    """First message to the engine: what to serve and how."""

    spec: PolicySpec
    config: LocalEngineConfig


@dataclass(frozen=True)
class Submit:
    """Sample this; the answer carries the same key."""

    key: int
    request: GenerationRequest


@dataclass(frozen=True)
class Abort:
    """Forget this request; no answer comes. Unknown keys are ignored: the answer may be on its way."""

    key: int


@dataclass(frozen=True)
class SetWeights:
    """Serve this version from now on."""

    version: int
    layout: FlatLayout | None
    """Set when a new buffer's file descriptor was sent just before."""
    changed: bool
    """False: the weights are the old ones, only the version moves."""


@dataclass(frozen=True)
class SetSleep:
    """Free the device's memory, or take it again with the weights that were sent last."""

    asleep: bool


@dataclass(frozen=True)
class Ready:
    """The engine is up."""

    backend: str
    vocab_size: int


@dataclass(frozen=True)
class Done:
    """The last `SetWeights` or `SetSleep` was carried out; weights of this version are served (asleep: will be)."""

    version: int


@dataclass(frozen=True)
class Refused:
    """The engine cannot do what the last `Start`, `SetWeights` or `SetSleep` asked for; it goes on as before."""

    reason: str


@dataclass(frozen=True)
class Unserved:
    """This request came while the engine was asleep: no response follows."""

    key: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """Responses that ended in one decode step, back to back in flat arrays."""

    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each response; their sum is the length `N` of the arrays."""
    stopped: tuple[bool, ...]
    """True: a stop token ended it; False: the limit did."""
    token_ids: np.ndarray
    """`[N]` int64."""
    logprobs: np.ndarray
    """`[N]` float32."""
    versions: np.ndarray
    """`[N]` int64."""


Command = Start | Submit | Abort | SetWeights | SetSleep
Reply = Ready | Done | Refused | Unserved | Finished
