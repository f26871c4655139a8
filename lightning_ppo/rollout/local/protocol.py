"""What the trainer's process and the engine's process say to each other: plain Python and numpy, no tensors."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_ppo.errors import EngineError
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


def check_request(request: GenerationRequest, max_context_tokens: int, vocab_size: int) -> None:
    """Refuse what the engine cannot sample.

    Raises:
        EngineError: the prompt is empty, leaves no room for a token, or has ids outside the vocabulary; or a sampling
            parameter or the seed is out of range.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise EngineError("prompt_ids=() is empty; send at least one token")
    if len(prompt) + 1 > max_context_tokens:
        raise EngineError(
            f"prompt_ids={len(prompt)} tokens leave no room for a response in max_context_tokens={max_context_tokens};"
            " shorten the prompt or raise max_context_tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise EngineError(f"prompt_ids={wrong} is outside the vocabulary; ids run from 0 to {vocab_size - 1}")
    checks = {
        "max_tokens": sampling.max_tokens >= 1,
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
    }
    for field, ok in checks.items():
        if not ok:
            raise EngineError(f"{field}={getattr(sampling, field)} is out of range; see SamplingParams")
    if not 0 <= request.seed < 2**63:
        raise EngineError(f"seed={request.seed} is out of range; set 0 <= seed < 2**63")
