"""The rollout pump: admits, dispatches and commits prompt groups for as long as training goes on."""

import asyncio
from collections.abc import Callable
from functools import partial

import torch

from lightning_ppo.batch import Prompt
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.responses import Responder, first_error
from lightning_ppo.rollout.samplers import Admission, Sampler
from lightning_ppo.rollout.stream import PromptStream, sample_seed


class Pump:
    """Per group, in this order: admission by the sampler, a buffer slot, an in-flight permit, dispatch, commit.

    Runs in the collector's event loop. Permits are not counted separately: the buffer's slots and the set of running
    tasks are the count, so they return on every path, a task that was cancelled before it started included.

    Args:
        buffer: Where groups go.
        prompts: The data set.
        stream: Which prompt is next.
        sampler: When it may be dispatched.
        responder: Generates and rewards.
        config: Group size and limits.
        sampling: How training responses are sampled.
        run_seed: Seed of the run.
    """

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        prompts: PromptSet,
        stream: PromptStream,
        sampler: Sampler,
        responder: Responder,
        config: RolloutConfig,
        sampling: SamplingParams,
        run_seed: int,
    ) -> None:
        self._buffer = buffer
        self._prompts = prompts
        self._stream = stream
        self._sampler = sampler
        self._responder = responder
        self._group_size = config.num_generations_per_prompt
        self._inflight_capacity = config.inflight_capacity
        self._sampling = sampling
        self._run_seed = run_seed
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self.version = 0
        """The published policy version; the trainer's thread sets it, then has `wake` called in the loop."""
        self.waiting_for = "its start"
        """What keeps the next group from being dispatched, for messages."""

    def wake(self) -> None:
        """Look at the gates again: a version was published, or slots were freed."""
        self._wake.set()

    async def run(self) -> None:
        """Dispatch groups until cancelled.

        Raises:
            BaseException: the first error of any group, itself; every other group is cancelled and its slot freed.
        """
        failure: BaseException
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    admission = await self._admission()
                    await self._until("a buffer slot", lambda: self._buffer.has_room)
                    await self._until("an in-flight permit", lambda: len(self._running) < self._inflight_capacity)
                    self._dispatch(groups, admission)
        except BaseExceptionGroup as group:
            failure = first_error(group)
        raise failure

    def _dispatch(self, groups: asyncio.TaskGroup, admission: Admission) -> None:
        draw = self._stream.next_draw()
        prompt = self._prompts[self._stream.row_of(draw)]
        group_id = self._buffer.reserve(draw, prompt, self.version, admission.target_step)
        task = groups.create_task(self._group(group_id, draw, prompt))
        self._running.add(task)
        task.add_done_callback(partial(self._finished, group_id))

    async def _group(self, group_id: str, draw: int, prompt: Prompt) -> None:
        prompt_ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as samples:
                responses = []
                for index in range(self._group_size):
                    name = f"{group_id}_g{index}"
                    seed = sample_seed(self._run_seed, draw, index)
                    responses.append(self._responder.respond(prompt, prompt_ids, name, name, self._sampling, seed))
                tasks = [samples.create_task(response) for response in responses[1:]]
                # this task would only wait: with one response per group that halves the tasks
                first = await responses[0]
        except BaseExceptionGroup as group:
            failure = first_error(group)
        if failure is not None:
            raise failure
        self._buffer.commit(group_id, [first, *(task.result() for task in tasks)], self.version)

    def _finished(self, group_id: str, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._buffer.remove(group_id)
        self._wake.set()

    async def _admission(self) -> Admission:
        found: list[Admission] = []

        def ask() -> bool:
            admission = self._sampler.admit(self.version)
            if admission is not None:
                found.append(admission)
            return admission is not None

        await self._until("the next policy version", ask)
        return found[0]

    async def _until(self, what: str, is_open: Callable[[], bool]) -> None:
        # Whatever opens a gate changes its state first and sets the event later, in this loop: nothing is missed.
        while not is_open():
            self.waiting_for = what
            self._wake.clear()
            await self._wake.wait()
        self.waiting_for = "nothing"
