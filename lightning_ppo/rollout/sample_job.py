"""Responses outside of training: validation, predict, and probes of what an engine serves."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.attempts import retried
from lightning_ppo.rollout.engine import Engine, Generation, GenerationRequest, SamplingParams
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.failures import FailureBudget
from lightning_ppo.rollout.loop_thread import LoopThread
from lightning_ppo.rollout.responses import Responder, first_error
from lightning_ppo.rollout.stream import TRAIN, sample_seed
from lightning_ppo.rollout.watchdog import Watchdog


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
        failures: How often a response is tried again; none is ever dropped.

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
        failures: FailureConfig,
    ) -> None:
        if namespace == TRAIN:
            raise ValueError(f"seed_namespace={namespace} belongs to training")
        self._responder = responder
        self._samples = [(prompt, index) for prompt in prompts for index in range(num_samples)]
        self._namespace = namespace
        self._sampling = sampling
        self._run_seed = run_seed
        self._number = number
        self._budget = FailureBudget(failures, f"{namespace} row")
        self.finished = 0
        """Responses that are; for any thread."""

    def describe(self) -> str:
        """Say how far it is, for messages."""
        return f"{self.finished} of {len(self._samples)} are"

    async def run(self) -> list[Trajectory]:
        """Sample everything; return it prompt by prompt.

        Raises:
            BaseException: the first error of any response whose attempts are used up, itself; the others are cancelled.
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
        prompt_ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        seed = sample_seed(self._run_seed, prompt.row, index, namespace=self._namespace)

        async def attempt(number: int) -> Trajectory:
            # A data loader may pad with a row that is in the job already, hence the place.
            request_id = f"{self._namespace}{self._number}_{place}" + (f"_try{number}" if number else "")
            return await self._responder.respond(prompt, prompt_ids, sample_id, request_id, self._sampling, seed)

        def delay_s(failure: Exception) -> float:
            return self._budget.retry(prompt.row, failure, place).delay_s

        try:
            trajectory = await retried(attempt, delay_s)
        finally:
            self._responder.forget([sample_id])
        self.finished += 1
        return trajectory


class SampleJobs:
    """Runs jobs in the collector's event loop and waits for them, in the trainer's thread.

    No slot, seed or draw of the rollouts is touched.

    Args:
        thread: The event loop.
        engine: Generates.
        responder: Generates and rewards.
        run_seed: Seed of the run.
        failures: Attempts, and what follows a stall.
        check: Called while waiting, with the caller's `poll`; what it raises ends the wait.
    """

    def __init__(
        self,
        thread: LoopThread,
        engine: Engine,
        responder: Responder,
        run_seed: int,
        failures: FailureConfig,
        check: Callable[[Callable[[], None]], None],
    ) -> None:
        self._thread = thread
        self._engine = engine
        self._responder = responder
        self._run_seed = run_seed
        self._failures = failures
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
            timeout_s: Seconds without any finished response that make a stall (`failures.stall_action`).
            poll: Called at once and then at least every `poll_s` seconds; what it raises propagates.
            poll_s: See `poll`; the engine's health is checked as often.

        Returns:
            `len(prompts) * num_samples` trajectories, prompt by prompt.

        Raises:
            RolloutError: none was finished for `timeout_s`, or the collector is closed.
            EngineError: the engine failed.
            RewardError: see `RewardFunction`.
        """
        self._count += 1
        number, failures, responder = self._count, self._failures, self._responder
        job = SampleJob(responder, prompts, seed_namespace, num_samples, sampling, self._run_seed, number, failures)
        stall = Watchdog(
            timeout_s,
            failures.stall_action,
            lambda: f"{job.describe()}, {responder.counts()}",
            what=f"no {seed_namespace} response was finished",
            suspect=responder.suspect,
        )

        def check() -> None:
            self._check(poll)
            stall.progress(job.finished)
            stall.check()

        return self._thread.wait(job.run(), f"{seed_namespace} responses", math.inf, check, min(poll_s, timeout_s))

    def probe(
        self, request: GenerationRequest, timeout_s: float, poll: Callable[[], None] = lambda: None
    ) -> Mapping[str, Generation]:
        """Have every replica of the engine answer the same request.

        Args:
            request: What to answer.
            timeout_s: Deadline for all replicas together, restarts included.
            poll: See `sample`.

        Raises:
            RolloutError: not all answered in time.
            EngineError: a replica failed.
        """
        return self._thread.wait(
            self._probe(request),
            # a replica may be on its way up again, which counts
            lambda: f"probe responses of {self._engine.describe()}",
            timeout_s,
            lambda: self._check(poll),
            poll_s=0.2,
        )

    async def _probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        return await self._engine.probe(request)
