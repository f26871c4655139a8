"""The collector: runs the rollouts in a thread of its own and hands finished prompt groups to the trainer."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_ppo.batch import Prompt, PromptGroup, Trajectory
from lightning_ppo.errors import CheckpointError, RolloutError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.engine import Engine, SamplingParams
from lightning_ppo.rollout.loop_thread import LoopThread
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.pump import Pump
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.responses import Responder
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.sample_job import SampleJob
from lightning_ppo.rollout.samplers import Sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.selection import Selection
from lightning_ppo.rollout.stream import PromptStream


class Collector:
    """Rollouts for the trainer. Every method is called by the trainer's thread, none waits without a deadline.

    Args:
        engine: Generates.
        prompts: The data set.
        stream: Order of the prompts, and what was trained.
        reward: Rewards responses.
        sampler: When groups may be dispatched, and which a step may train.
        config: Sizes, sampling, deadlines.
        tokenizer: Decodes responses.
        run_seed: Seed of every response.
        align: Every chunk is a multiple of this many groups, see `group_alignment`.
        stop_token_ids: Tokens that end a training response.
        schedule: Recorded chunks to use; None: those of `config.replay_chunks`, or whatever is finished.

    Raises:
        ConfigError: the buffer is smaller than the sampler needs, or `num_prompts_per_step` is no multiple of `align`.
        DataError: `config.replay_chunks` cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptSet,
        stream: PromptStream,
        reward: RewardFunction,
        sampler: Sampler,
        config: RolloutConfig,
        *,
        tokenizer: Any,
        run_seed: int,
        align: int = 1,
        stop_token_ids: tuple[int, ...],
        schedule: ChunkSchedule | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._stream = stream
        self._sampler = sampler
        self._config = config
        self._run_seed = run_seed
        self._buffer = ReplayBuffer(config.buffer_capacity, config.num_generations_per_prompt)
        self._selection = Selection(self._buffer, sampler, config, align, schedule)
        self._responder = Responder(engine, reward, tokenizer)
        self._pump = Pump(
            buffer=self._buffer,
            prompts=prompts,
            stream=stream,
            sampler=sampler,
            responder=self._responder,
            config=config,
            sampling=config.training_sampling(stop_token_ids),
            run_seed=run_seed,
        )
        self._thread = LoopThread("rollout-collector", self._crashed)
        self._failure: BaseException | None = None
        self._started = False
        self._jobs = 0

    def open(self) -> None:
        """Start the event loop; `start` and `sample` do it themselves.

        Raises:
            RolloutError: the collector is closed.
        """
        self._thread.start()

    def start(self, ppo_step: int, version: int) -> None:
        """Start generating for PPO step `ppo_step` on policy `version`, which the engine must serve already.

        Raises:
            RolloutError: it was started before, or is closed.
        """
        if self._started:
            raise RolloutError("the rollout collector was started already; build a new one for another run")
        self._started = True
        self._sampler.seed_dispatch(ppo_step, version)
        self._pump.version = version
        self._thread.submit(self._run_pump())

    def publish_version(self, version: int) -> None:
        """Tell the admission gate that the engine serves `version` now; does not block."""
        self._pump.version = version
        self._thread.call(self._pump.wake)

    def next_groups(
        self, ppo_step: int, remaining: int, poll: Callable[[], None], poll_s: float = 0.2
    ) -> tuple[PromptGroup, ...]:
        """Wait for the next chunk of a PPO step and claim it.

        Args:
            ppo_step: The step that trains it.
            remaining: Groups of this step that were not handed out yet.
            poll: Called at once and then at least every `poll_s` seconds, without any lock; what it raises propagates.
            poll_s: See `poll`; the engine's health is checked as often.

        Returns:
            The groups in dispatch order. They keep their buffer slots until `release`.

        Raises:
            RolloutError: no group was finished for `timeout_s`, or the collector is not running.
            DataError: a replayed schedule does not fit this step.
            BaseException: what made the rollouts fail, itself (`EngineError`, `RewardError`, `DataError`, ...).
        """
        if not self._started:
            raise RolloutError("rollouts were not started; call start first")
        self._selection.check(ppo_step, remaining)
        began_s = time.monotonic()
        poll_due_s = began_s
        while True:
            if time.monotonic() >= poll_due_s:
                self._check(poll)
                poll_due_s = time.monotonic() + poll_s
            with self._buffer.changed:
                if self._failure is not None:
                    raise self._failure
                groups = self._selection.pick(ppo_step, remaining, self._pump.version)
                if groups:
                    self._buffer.claim(groups)
                    return groups
                now = time.monotonic()
                idle_s = now - max(began_s, self._buffer.last_commit_s)
                if idle_s >= self._config.timeout_s:
                    raise RolloutError(
                        f"no prompt group was finished for timeout_s={self._config.timeout_s:g}; "
                        f"{self._buffer.describe()}, dispatch waits for {self._pump.waiting_for}; "
                        "look at the engine's log, or set a longer timeout_s"
                    )
                self._buffer.changed.wait(max(0.0, min(poll_due_s - now, self._config.timeout_s - idle_s)))

    def release(self, draws: Iterable[int]) -> None:
        """Record claimed groups as trained and free their slots.

        Raises:
            ValueError: a draw is not being trained; nothing changes.
        """
        trained = tuple(draws)
        self._buffer.release(trained)
        self._stream.mark_trained(trained)
        self._thread.call(self._pump.wake)

    def abandon(self) -> None:
        """Make every claimed group ready again: the step that claimed it failed."""
        self._buffer.unclaim()

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
        """Sample and reward responses outside of training: no slot, seed or draw of the rollouts is touched.

        Args:
            prompts: What to answer; seeds depend on (run seed, namespace, row, sample index) only.
            seed_namespace: For example `validate`.
            num_samples: Responses per prompt.
            sampling: How to sample.
            timeout_s: Deadline for all responses together.
            poll: See `next_groups`.
            poll_s: See `next_groups`.

        Returns:
            `len(prompts) * num_samples` trajectories, prompt by prompt.

        Raises:
            RolloutError: not all were finished in time, or the collector is closed.
            EngineError: the engine failed.
            RewardError: see `RewardFunction`.
        """
        self._jobs += 1
        job = SampleJob(self._responder, prompts, seed_namespace, num_samples, sampling, self._run_seed, self._jobs)
        return self._thread.wait(job.run(), f"{seed_namespace} responses", timeout_s, lambda: self._check(poll), poll_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the prompt stream's ledger and the fingerprint of the prompts."""
        return {"stream": self._stream.state_dict(), "prompts": self._prompts.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the first untrained prompt; before `start`.

        Raises:
            CheckpointError: the state was saved with other prompts, seed or shuffle setting, or rollouts run already.
        """
        if self._started:
            raise CheckpointError("rollouts run already; load the checkpoint before they start")
        if state["prompts"] != self._prompts.fingerprint:
            raise CheckpointError("the prompts differ from those of the checkpoint; resume with the same data set")
        self._stream.load_state_dict(state["stream"])

    def close(self) -> None:
        """Cancel everything and end the thread within seconds; safe to call twice."""
        self._fail(RolloutError("the rollout collector is closed"))
        self._thread.close()

    async def _run_pump(self) -> None:
        try:
            await self._pump.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    def _check(self, poll: Callable[[], None]) -> None:
        poll()
        self._engine.check_health()

    def _crashed(self, error: BaseException) -> None:
        failure = RolloutError(f"the rollout thread stopped ({type(error).__name__}: {error})")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        with self._buffer.changed:
            if self._failure is None:
                self._failure = error
            self._buffer.changed.notify_all()
