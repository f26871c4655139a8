"""The collector: runs the rollouts in a thread of its own and hands finished prompt groups to the trainer."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import CheckpointError, RolloutError
from lightning_ppo.rollout.claims import Claim, Claims
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.engine import Engine
from lightning_ppo.rollout.failures import FailureBudget
from lightning_ppo.rollout.group_record import GroupRecord
from lightning_ppo.rollout.loop_thread import LoopThread
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.pump import Pump
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.regeneration import refresh
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.responses import Responder
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.sample_job import SampleJobs
from lightning_ppo.rollout.sampler_protocol import Sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.selection import Selection
from lightning_ppo.rollout.snapshot import Snapshots, rollout_fingerprint
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.watchdog import Watchdog
from lightning_ppo.rollout.windows import VersionWindow


class Collector:
    """Rollouts for the trainer. Every method is called by the trainer's thread, none waits without a deadline.

    Args:
        engine: Generates.
        prompts: The data set.
        stream: Order of the prompts, and what became of each.
        reward: Rewards responses.
        sampler: When groups may be dispatched, and which a step may train.
        config: Sizes, sampling, deadlines.
        tokenizer: Decodes responses.
        run_seed: Seed of every response.
        align: Every chunk is a multiple of this many groups, see `group_alignment`.
        stop_token_ids: Tokens that end a training response.
        schedule: Recorded chunks to use; None: those of `config.replay_chunks`, or whatever is finished.
        recorded: An earlier run to be repeated, whose sampler and chunks the other arguments are.
        warmup_steps: PPO steps that leave the policy as it is.
        directory: Where the journal goes; None keeps none.

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
        recorded: RecordedRun | None = None,
        warmup_steps: int = 0,
        directory: Path | None = None,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._sampler = sampler
        self._config = config
        self._run_seed = run_seed
        self._window = VersionWindow.of(config, warmup_steps)
        self._buffer = ReplayBuffer(config.buffer_capacity, config.num_generations_per_prompt)
        self._claims = Claims(self._buffer, stream.ledger, recorded)
        self._selection = Selection(self._buffer, sampler, config, align, schedule)
        self._responder = Responder(engine, reward, tokenizer)
        self._budget = FailureBudget(config.failures)
        self._pump = Pump(
            buffer=self._buffer,
            prompts=prompts,
            stream=stream,
            sampler=sampler,
            responder=self._responder,
            budget=self._budget,
            config=config,
            sampling=config.training_sampling(stop_token_ids),
            run_seed=run_seed,
            on_commit=lambda group: self._snapshots.append(group),
            recorded=recorded,
        )
        self._snapshots = Snapshots(
            buffer=self._buffer,
            prompts=prompts,
            stream=stream,
            pump=self._pump,
            budget=self._budget,
            sampler=sampler,
            config=config,
            window=self._window,
            fingerprint=rollout_fingerprint(prompts, run_seed, config, stop_token_ids),
            directory=directory,
            recorded=recorded,
        )
        action, suspect = config.failures.stall_action, self._responder.suspect
        self._watchdog = Watchdog(config.timeout_s, action, self._describe, suspect=suspect)
        self._thread = LoopThread("rollout-collector", self._crashed)
        self.jobs = SampleJobs(self._thread, engine, self._responder, run_seed, config.failures, self._check)
        """Responses outside of training."""
        self._failure: BaseException | None = None
        self._started = False
        self._waits = 0

    def open(self) -> None:
        """Start the event loop; `start` and `jobs` do it themselves.

        Raises:
            RolloutError: the collector is closed.
        """
        self._thread.start()

    def start(self, ppo_step: int, version: int) -> None:
        """Start generating for PPO step `ppo_step` on policy `version`, which the engine must serve already.

        Rollouts of a loaded state that are still of use are taken over; what was in flight is generated again.

        Raises:
            RolloutError: it was started before, or is closed.
            CheckpointError: the journal beside the checkpoint is damaged.
        """
        if self._started:
            raise RolloutError("the rollout collector was started already; build a new one for another run")
        self._pump.version = version
        restored = self._snapshots.restore(ppo_step, version)
        self._started = True
        self._sampler.seed_dispatch(ppo_step, version, restored)
        self._thread.submit(self._run_pump())

    # ------------------------------------------------------------------ weight updates

    def drain(self, poll: Callable[[], None], poll_s: float = 0.2) -> None:
        """Dispatch nothing new until the next `publish_version`, and wait until no response is being generated.

        Args:
            poll: Called at once and then at least every `poll_s` seconds; what it raises propagates.
            poll_s: See `poll`; the engine's health is checked as often.

        Raises:
            RolloutError: responses were still being generated after `timeout_s`; the message names them.
            BaseException: what made the rollouts fail, itself.
        """
        if not self._started:
            return
        timeout_s, action = self._config.timeout_s, self._config.failures.stall_action
        named, suspect = self._responder.describe, self._responder.suspect
        stall = Watchdog(timeout_s, action, self._describe_drain, what="new weights waited", suspect=suspect)

        def check() -> None:
            self._check(poll)
            stall.check()

        self._thread.wait(self._pump.drain(), named, math.inf, check, min(poll_s, timeout_s))

    def publish_version(self, version: int) -> None:
        """Tell the admission gate that the engine serves `version` now; does not block."""
        self._pump.version = version
        oldest = self._window.oldest_allowed(version)
        self._thread.call(lambda: self._pump.on_version(oldest))

    # ------------------------------------------------------------------ chunks

    def next_groups(self, ppo_step: int, consumed: int, poll: Callable[[], None], poll_s: float = 0.2) -> Claim:
        """Wait for the next chunk of a PPO step and claim it.

        Args:
            ppo_step: The step that trains it.
            consumed: Groups of this step that were handed out already.
            poll: Called at once and then at least every `poll_s` seconds, without any lock; what it raises propagates.
            poll_s: See `poll`; the engine's health is checked as often.

        Returns:
            The groups in draw order. They keep their buffer slots until `release`.

        Raises:
            RolloutError: no group was finished for `timeout_s`, or the collector is not running.
            DataError: a replayed schedule does not fit this step.
            BaseException: what made the rollouts fail, itself (`EngineError`, `RewardError`, `DataError`, ...).
        """
        if not self._started:
            raise RolloutError("rollouts were not started; call start first")
        self._selection.check(ppo_step, self._config.num_prompts_per_step - consumed)
        self._waits += 1
        poll_due_s = time.monotonic()
        while True:
            if time.monotonic() >= poll_due_s:
                self._check(poll)
                poll_due_s = time.monotonic() + poll_s
            with self._buffer.changed:
                if self._failure is not None:
                    raise self._failure
                # a group may be lost for good while the step waits for it
                size = self._config.num_prompts_per_step - self._pump.dropped[ppo_step]
                if refresh(self._buffer, self._stream, self._pump, self._sampler, self._window, ppo_step):
                    self._thread.call(self._pump.wake)
                groups: tuple[PromptGroup, ...] = ()
                if consumed < size:
                    groups = self._selection.pick(ppo_step, size - consumed, self._pump.version)
                if groups or consumed >= size:
                    self._claims.take(groups)
                    return Claim(groups, size, self._budget.counts)
                if self._pump.is_shut:
                    self._selection.check_coming(ppo_step, size - consumed)
                self._watchdog.progress(self._pump.commits, self._waits)
                self._watchdog.check()
                left_s = min(poll_due_s - time.monotonic(), self._watchdog.left_s)
                self._buffer.changed.wait(max(0.0, left_s))

    def release(self, draws: Iterable[int]) -> list[GroupRecord]:
        """Record claimed groups as trained and free their slots.

        Returns:
            What to write into the run's schedule about them.

        Raises:
            ValueError: a draw is not being trained; nothing changes.
        """
        records = self._claims.release(draws)
        self._thread.call(self._pump.wake)
        return records

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the ledger of prompts, finished groups, and what was in flight."""
        return self._snapshots.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; before `start`, which takes the rollouts over.

        Raises:
            CheckpointError: the state is damaged, or was saved with other prompts, seed or shuffle setting, or rollouts
                run already; nothing was loaded.
        """
        if self._started:
            raise CheckpointError("rollouts run already; load the checkpoint before they start")
        self._snapshots.load(state)

    def checkpointed(self, ppo_step: int) -> None:
        """A checkpoint of this PPO step is being written: older parts of the journal are no longer needed."""
        self._snapshots.trim(ppo_step)

    def close(self) -> None:
        """Cancel everything and end the thread within seconds; safe to call twice."""
        self._fail(RolloutError("the rollout collector is closed"))
        self._thread.close()
        self._snapshots.close()

    # ------------------------------------------------------------------

    async def _run_pump(self) -> None:
        try:
            await self._pump.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    def _describe(self) -> str:
        waits = f"{self._responder.counts()}, dispatch waits for {self._pump.waiting_for}"
        return f"{self._buffer.describe()}, {waits}; {self._engine.describe()}"

    def _describe_drain(self) -> str:
        return f"still generating {self._responder.describe()}, {self._responder.counts()}"

    def _check(self, poll: Callable[[], None]) -> None:
        poll()
        self._engine.check_health()
        if self._failure is not None:
            raise self._failure

    def _crashed(self, error: BaseException) -> None:
        failure = RolloutError(f"the rollout thread stopped ({type(error).__name__}: {error})")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        with self._buffer.changed:
            if self._failure is None:
                self._failure = error
            self._buffer.changed.notify_all()
