"""One response: generate, check, decode, reward."""

import asyncio
import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.errors import EngineError, RolloutError
from lightning_ppo.rollout.engine import Engine, Generation, GenerationRequest, SamplingParams
from lightning_ppo.rollout.reward import RewardFunction

MAX_NAMED = 3
"""Responses in flight that a message names."""


class Responder:
    """Turns prompts into trajectories, one response at a time; runs in the collector's event loop.

    Args:
        engine: Generates.
        reward: Rewards each response as soon as it is finished.
        tokenizer: Hugging Face tokenizer that decodes responses.
    """

    def __init__(self, engine: Engine, reward: RewardFunction, tokenizer: object) -> None:
        self._engine = engine
        self._reward = reward
        self._tokenizer = tokenizer
        self.generating: dict[str, float] = {}
        """Responses that were dispatched and are not sampled yet, with the time of their dispatch."""
        self._rewarding = 0
        """Responses that are sampled and not rewarded yet."""
        self.is_held = False
        """Whether nothing new may be generated, because weights are about to change."""
        self._reopened = asyncio.Event()

    def hold(self) -> None:
        """Generate only what is being generated, or was announced."""
        self.is_held = True

    def reopen(self) -> None:
        """End a hold."""
        self.is_held = False
        self._reopened.set()
        self._reopened.clear()

    def announce(self, sample_ids: Iterable[str]) -> None:
        """Count responses as being generated from now on, before their tasks have started."""
        now = time.monotonic()
        self.generating.update(dict.fromkeys(sample_ids, now))

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Stop counting responses; those that were sampled are forgotten already."""
        for sample_id in sample_ids:
            self.generating.pop(sample_id, None)

    def describe(self) -> str:
        """Name what is being generated, longest first, for messages."""
        now = time.monotonic()
        # a copy first: the event loop goes on
        oldest = sorted(dict(self.generating).items(), key=lambda item: item[1])
        named = [f"{sample_id} ({now - since_s:.1f} s)" for sample_id, since_s in oldest[:MAX_NAMED]]
        more = ["..."] if len(oldest) > MAX_NAMED else []
        return f"{len(oldest)} responses [{', '.join(named + more)}]"

    def counts(self) -> str:
        """Say how many responses are at which stage, for messages."""
        return f"being sampled: {len(self.generating)} responses, being rewarded: {self._rewarding}"

    def suspect(self) -> str:
        """Name what to look at when nothing is finished any more."""
        if self._reward.is_called:
            return f"the reward {self._reward.name}, which does not return and holds everything else up"
        if self._rewarding > 0 and not self.generating:
            return f"the reward {self._reward.name}, which every response waits for"
        return "the engine's log"

    async def respond(
        self, prompt: Prompt, prompt_ids: Tensor, sample_id: str, request_id: str, sampling: SamplingParams, seed: int
    ) -> Trajectory:
        """Sample one response and reward it. Every generated token is trained, no token of the prompt is.

        Args:
            prompt: The prompt.
            prompt_ids: Its tokens, `[L]` int64, shared by all responses.
            sample_id: Name of the trajectory.
            request_id: Name of the request; unique among those in flight.
            sampling: How to sample.
            seed: Seed of this response.

        Raises:
            EngineError: the engine failed, or answered with something that is no response.
            RewardError: see `RewardFunction`.
            RolloutError: the request was cancelled, but not by its caller.
        """
        while self.is_held and sample_id not in self.generating:
            await self._reopened.wait()
        self.generating.setdefault(sample_id, time.monotonic())
        request = GenerationRequest(request_id=request_id, prompt_ids=prompt.token_ids, sampling=sampling, seed=seed)
        try:
            generation = await self._engine.generate(request)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # A task group takes a cancelled child for one that was given up on purpose; this one was not.
            raise RolloutError(f"the engine cancelled request {request_id}; look at its log") from error
        except SystemExit as error:
            # asyncio would end the whole event loop over it.
            raise EngineError(
                f"the engine called exit({error.code}) in request {request_id}; look at its log"
            ) from error
        _check(generation, request)
        self.generating.pop(sample_id, None)
        text = self._tokenizer.decode(list(generation.token_ids), skip_special_tokens=True)  # type: ignore[attr-defined]
        self._rewarding += 1
        try:
            reward = await self._reward(prompt, text, generation.finish_reason)
        finally:
            self._rewarding -= 1
        return Trajectory(
            sample_id=sample_id,
            prompt_ids=prompt_ids,
            response_ids=torch.tensor(generation.token_ids, dtype=torch.int64),
            response_mask=torch.ones(len(generation.token_ids), dtype=torch.bool),
            rollout_logprobs=torch.tensor(generation.logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(generation.policy_versions, dtype=torch.int64),
            reward=reward,
            finish_reason=generation.finish_reason,
            response_text=text,
        )


def first_error(group: BaseExceptionGroup) -> BaseException:
    """Return the error that happened first in a task group, however deeply nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check(generation: Generation, request: GenerationRequest) -> None:
    tokens = len(generation.token_ids)
    wrong = ""
    if not 1 <= tokens <= request.sampling.max_tokens:
        wrong = f"{tokens} tokens for max_tokens={request.sampling.max_tokens}"
    elif not tokens == len(generation.logprobs) == len(generation.policy_versions):
        wrong = f"{tokens} tokens, {len(generation.logprobs)} log-probs, {len(generation.policy_versions)} versions"
    elif not all(map(math.isfinite, generation.logprobs)):
        wrong = "a log-prob that is not finite"
    elif generation.finish_reason not in ("stop", "length"):
        wrong = f"finish_reason={generation.finish_reason}"
    if wrong:
        raise EngineError(f"the engine answered request {request.request_id} with {wrong}; look at its log")
