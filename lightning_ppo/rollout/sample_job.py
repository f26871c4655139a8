"""Responses outside of training: validation, predict, and probes of what an engine serves."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.engine import Engine, Generation, GenerationRequest, SamplingParams
from lightning_ppo.rollout.loop_thread import LoopThread
from lightning_ppo.rollout.responses import Responder, first_error
from lightning_ppo.rollout.stream import TRAIN, sample_seed


class SampleJob:
    """A fixed set of responses; runs in the collector's event loop, beside the pump, and shares nothing with it.

    Args:
        responder: Generates and rewards.
        prompts: What to answer.
        namespace: Seed namespace; seeds depend on (run seed, namespace, row, sample index) only.
        num_samples: Responses per prompt.
        sampling: How to sample.
        run_seed: Seed of the run.
        number: Keeps the requests of several jobs apart.

    Raises:
        ValueError: the namespace is training's.
    """

    def __init__(
        self,
        responder: Responder,
        prompts: Sequence[Prompt],
        namespace: str,
        num_samples: int,
        sampling: SamplingParams,
        run_seed: int,
        number: int,
    ) -> None:
        if namespace == TRAIN:
            raise ValueError(f"seed_namespace={namespace} belongs to training")
        self._responder = responder
        self._samples = [(prompt, index) for prompt in prompts for index in range(num_samples)]
        self._namespace = namespace
        self._sampling = sampling
        self._run_seed = run_seed
        self._number = number

    async def run(self) -> list[Trajectory]:
        """Sample everything; return it prompt by prompt.

        Raises:
            BaseException: the first error of any response, itself; the others are cancelled.
        """
        failure: BaseException
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(place)) for place in range(len(self._samples))]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            failure = first_error(errors)
        raise failure

    async def _one(self, place: int) -> Trajectory:
        prompt, index = self._samples[place]
        sample_id = f"{self._namespace}_row{prompt.row}_g{index}"
        try:
            return await self._responder.respond(
                prompt,
                torch.tensor(prompt.token_ids, dtype=torch.int64),
                sample_id,
                # A data loader may pad with a row that is in the job already, hence the place.
                f"{self._namespace}{self._number}_{place}",
                self._sampling,
                sample_seed(self._run_seed, prompt.row, index, namespace=self._namespace),
            )
        finally:
            self._responder.forget([sample_id])


class SampleJobs:
    """Runs jobs in the collector's event loop and waits for them, in the trainer's thread.

    No slot, seed or draw of the rollouts is touched.

    Args:
        thread: The event loop.
        engine: Generates.
        responder: Generates and rewards.
        run_seed: Seed of the run.
        check: Called while waiting, with the caller's `poll`; what it raises ends the wait.
    """

    def __init__(
        self,
        thread: LoopThread,
        engine: Engine,
        responder: Responder,
        run_seed: int,
        check: Callable[[Callable[[], None]], None],
    ) -> None:
        self._thread = thread
        self._engine = engine
        self._responder = responder
        self._run_seed = run_seed
        self._check = check
        self._count = 0

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        seed_namespace: str,
        num_samples: int = 1,
        sampling: SamplingParams,
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
        poll_s: float = 0.2,
    ) -> list[Trajectory]:
        """Sample and reward responses.

        Args:
            prompts: What to answer; seeds depend on (run seed, namespace, row, sample index) only.
            seed_namespace: For example `validate`.
            num_samples: Responses per prompt.
            sampling: How to sample.
            timeout_s: Deadline for all responses together.
            poll: Called at once and then at least every `poll_s` seconds; what it raises propagates.
            poll_s: See `poll`; the engine's health is checked as often.

        Returns:
            `len(prompts) * num_samples` trajectories, prompt by prompt.

        Raises:
            RolloutError: not all were finished in time, or the collector is closed.
            EngineError: the engine failed.
            RewardError: see `RewardFunction`.
        """
        self._count += 1
        job = SampleJob(self._responder, prompts, seed_namespace, num_samples, sampling, self._run_seed, self._count)
        what = f"{seed_namespace} responses"
        return self._thread.wait(job.run(), what, timeout_s, lambda: self._check(poll), poll_s)

    def probe(
        self, request: GenerationRequest, timeout_s: float, poll: Callable[[], None] = lambda: None
    ) -> Mapping[str, Generation]:
        """Have every replica of the engine answer the same request.

        Args:
            request: What to answer.
            timeout_s: Deadline for all replicas together.
            poll: See `sample`.

        Raises:
            RolloutError: not all answered in time.
            EngineError: a replica failed.
        """
        return self._thread.wait(
            self._probe(request), "probe responses", timeout_s, lambda: self._check(poll), poll_s=0.2
        )

    async def _probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        return await self._engine.probe(request)
