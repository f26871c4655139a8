"""Responses outside of training: validation and predict."""

import asyncio
from collections.abc import Sequence

import torch

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.engine import SamplingParams
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
        return await self._responder.respond(
            prompt,
            torch.tensor(prompt.token_ids, dtype=torch.int64),
            f"{self._namespace}_row{prompt.row}_g{index}",
            # A data loader may pad with a row that is in the job already, hence the place.
            f"{self._namespace}{self._number}_{place}",
            self._sampling,
            sample_seed(self._run_seed, prompt.row, index, namespace=self._namespace),
        )
