"""All responses to one drawn prompt, with retries."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import torch

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.attempts import retried
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failure_class import FailureClass, classify
from lightning_ppo.rollout.failures import Drop, FailureBudget
from lightning_ppo.rollout.responses import Responder
from lightning_ppo.rollout.stream import sample_seed


class DroppedPrompt(Exception):  # noqa: N818 - no error: the run goes on
    """A prompt is given up within the drop budget; the last failure is the cause.

    Args:
        draw: Its draw.
        reason: Why, in one line.
    """

    def __init__(self, draw: int, reason: str) -> None:
        super().__init__(f"draw {draw} is dropped: {reason}")
        self.draw = draw
        self.reason = reason


class GroupTask:
    """Samples one prompt group in the collector's event loop; its caller commits the group, or frees its slot.

    A failed response is sampled again with the same seed, alone: its finished siblings stay. A response that cannot be
    had drops the prompt or ends the run; it never becomes a row.

    Args:
        responder: Generates and rewards.
        prompt: The prompt.
        draw: Its draw, which the seeds depend on.
        group_id: Name of the group; its responses are `{group_id}_g{index}`.
        sampling: How to sample.
        group_size: G.
        run_seed: Seed of the run.
        budget: Decides what follows a failure. The caller tells it of the commit.
        finished: Responses that exist already, by index; they are not sampled again.
        sleep: Waits before another attempt.
        first_attempt: Number of the first attempt; `next_attempt` of the task that this one replaces, if any.

    Raises:
        ValueError: `finished` has an index outside of the group.
    """

    def __init__(
        self,
        responder: Responder,
        prompt: Prompt,
        draw: int,
        group_id: str,
        sampling: SamplingParams,
        group_size: int,
        run_seed: int,
        budget: FailureBudget,
        finished: Mapping[int, Trajectory] | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        *,
        first_attempt: int = 0,
    ) -> None:
        self._responder = responder
        self._prompt = prompt
        self._prompt_ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        self._draw = draw
        self._group_id = group_id
        self._sampling = sampling
        self._group_size = group_size
        self._run_seed = run_seed
        self._budget = budget
        self._sleep = sleep
        self._first_attempt = first_attempt
        self._end: Exception | None = None
        self.next_attempt = first_attempt + 1
        """Number that no attempt of this task has reached."""
        self.finished: dict[int, Trajectory] = {} if finished is None else dict(finished)
        """Finished responses by index; another thread copies it with `dict(...)` before it iterates."""
        if not all(0 <= index < group_size for index in self.finished):
            raise ValueError(f"finished={sorted(self.finished)} does not fit a group of {group_size}")

    async def run(self) -> tuple[Trajectory, ...]:
        """Sample what is missing; cancelling the calling task aborts every request.

        Returns:
            All responses, by index.

        Raises:
            DroppedPrompt: the prompt is given up; requests of the others were aborted.
            BaseException: a response's error that ends the run, itself; requests of the others were aborted.
        """
        missing = [index for index in range(self._group_size) if index not in self.finished]
        if len(missing) == 1:
            await self._sample(missing[0])
        elif missing:
            await self._sample_all(missing)
        return tuple([self.finished[index] for index in range(self._group_size)])

    async def _sample_all(self, missing: list[int]) -> None:
        try:
            async with asyncio.TaskGroup() as siblings:
                for index in missing[1:]:
                    siblings.create_task(self._sample(index))
                # This task would only wait.
                await self._sample(missing[0])
            return
        except BaseExceptionGroup as group:
            # Responses can fail in the same turn of the loop, before the first failure has cancelled the second.
            ends = [error for error in group.exceptions if not isinstance(error, DroppedPrompt)] or group.exceptions
            failure = ends[0]
        raise failure

    async def _sample(self, index: int) -> None:
        name = f"{self._group_id}_g{index}"
        seed = sample_seed(self._run_seed, self._draw, index)

        async def attempt(number: int) -> Trajectory:
            self.next_attempt = max(self.next_attempt, number + 1)
            # An engine may still be busy aborting the request of an earlier attempt.
            request_id = name if number == 0 else f"{name}_try{number}"
            return await self._responder.respond(self._prompt, self._prompt_ids, name, request_id, self._sampling, seed)

        delay_s = partial(self._delay_s, index)
        self.finished[index] = await retried(attempt, delay_s, self._pause, first=self._first_attempt)

    async def _pause(self, delay_s: float) -> None:
        await self._sleep(delay_s)
        if self._end is not None:
            raise self._end

    def _delay_s(self, index: int, failure: Exception) -> float:
        if self._end is not None and classify(failure) is not FailureClass.FATAL:
            raise self._end
        try:
            decision = self._budget.decide(self._draw, failure, index)
        except Exception as error:
            self._end = error
            raise
        if isinstance(decision, Drop):
            self._end = DroppedPrompt(self._draw, decision.reason)
            raise self._end from failure
        return decision.delay_s
