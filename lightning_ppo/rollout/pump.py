"""The rollout pump: admits, dispatches and commits prompt groups for as long as training goes on."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.engine import SamplingParams
from lightning_ppo.rollout.failures import FailureBudget
from lightning_ppo.rollout.group_task import DroppedPrompt, GroupTask
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.replay import PendingGroup, ReplayBuffer
from lightning_ppo.rollout.responses import Responder, first_error
from lightning_ppo.rollout.sampler_protocol import Admission, Sampler
from lightning_ppo.rollout.slots import Slots
from lightning_ppo.rollout.stream import PromptStream

DRAIN_POLL_S = 0.002
"""How often a drain looks at what is still being generated."""


class Pump:
    """Dispatches groups through four gates: weight update, in-flight permit, buffer slot, admission by the sampler.

    Runs in the collector's event loop. Permits are not counted separately: the buffer's slots and the set of running
    tasks are the count, so they return on every path, a task that was cancelled before it started included. Groups
    that have a slot already (restored, or generated again) go before new ones and need no admission.

    Args:
        buffer: Where groups go.
        prompts: The data set.
        stream: Which prompt is next, and what became of each.
        sampler: When it may be dispatched.
        responder: Generates and rewards.
        budget: What follows a failure.
        config: Group size and limits.
        sampling: How training responses are sampled.
        run_seed: Seed of the run.
        on_commit: Called with every finished group.
        recorded: An earlier run to be repeated.
    """

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        prompts: PromptSet,
        stream: PromptStream,
        sampler: Sampler,
        responder: Responder,
        budget: FailureBudget,
        config: RolloutConfig,
        sampling: SamplingParams,
        run_seed: int,
        on_commit: Callable[[PromptGroup], None],
        recorded: RecordedRun | None = None,
    ) -> None:
        self._buffer = buffer
        self._slots = Slots(buffer, prompts, stream)
        self._sampler = sampler
        self._responder = responder
        self._budget = budget
        self._config = config
        self._sampling = sampling
        self._run_seed = run_seed
        self._on_commit = on_commit
        self._recorded = recorded
        self._wake = asyncio.Event()
        self._running: dict[int, tuple[asyncio.Task[None], GroupTask]] = {}
        """Tasks by draw."""
        self._outdated: set[int] = set()
        """Draws whose task was cancelled to start again on newer weights."""
        self._again: deque[tuple[PendingGroup, Mapping[int, Trajectory]]] = deque()
        """Groups with a slot that wait for their dispatch, with the responses they have already."""
        self._attempts: dict[int, int] = {}
        """Attempts that groups which start again have behind them: an aborted request may still hold its name."""
        self._oldest_allowed = 0
        self._shut_at: int | None = None
        """The version that the sampler admits nothing more at."""
        self._failure: BaseException | None = None
        """What ended the rollouts, known before every other group is cancelled."""
        self.version = 0
        """The published policy version; the trainer's thread sets it, then has `on_version` called in the loop."""
        self.commits = 0
        self.dropped: Counter[int | None] = Counter()
        """Groups that each PPO step has lost for good (`failures.drop=skip`)."""
        self.waiting_for = "its start"
        """What keeps the next group from being dispatched, for messages."""

    def wake(self) -> None:
        """Look at the gates again: slots were freed, or there are groups to be generated again."""
        self._wake.set()

    async def drain(self) -> None:
        """Dispatch nothing until a version is published, and return when nothing is being generated.

        Responses that are being rewarded are not waited for.

        Raises:
            BaseException: what ended the rollouts meanwhile, itself.
        """
        self._responder.hold()
        while self._failure is None and not self._is_drained:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._failure is not None:
            raise self._failure

    def on_version(self, oldest_allowed: int) -> None:
        """A version was published: dispatch again, and start over what would be too old when it is finished.

        Args:
            oldest_allowed: The oldest version that may still be trained.
        """
        self._responder.reopen()
        self._oldest_allowed = oldest_allowed
        for slot in self._buffer.pending():
            aborts = self._sampler.aborts_inflight(slot.start_version, self.version)
            is_outdated = aborts or slot.start_version < oldest_allowed
            if is_outdated and slot.draw in self._running and slot.draw not in self._outdated:
                self._outdated.add(slot.draw)
                self._running[slot.draw][0].cancel()
        self.wake()

    def dispatch_again(self, slot: PendingGroup, finished: Mapping[int, Trajectory]) -> None:
        """Generate a group that has a slot already; from any thread, followed by `wake` in the loop.

        Args:
            slot: The group.
            finished: Responses that it has already.
        """
        self._again.append((slot, finished))

    def finished_siblings(self, draw: int) -> dict[int, Trajectory]:
        """Return the finished responses of a group in flight; from any thread."""
        running = self._running.get(draw)
        if running is not None:
            return dict(running[1].finished)
        return next((dict(finished) for slot, finished in tuple(self._again) if slot.draw == draw), {})

    @property
    def is_shut(self) -> bool:
        """Whether no draw is dispatched any more until a version is published, or slots are freed; from any thread."""
        return self._shut_at == self.version or not self._buffer.has_room

    @property
    def _is_drained(self) -> bool:
        if self._recorded is None:
            return not self._responder.generating
        # everything of this version is dispatched, and rewarded too: a checkpoint of this step must hold all of it
        return self._recorded.is_done(self.version) and not self._again and not self._running

    async def run(self) -> None:
        """Dispatch groups until cancelled.

        Raises:
            BaseException: the first error of any group, itself; every other group is cancelled and its slot freed.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                await self._dispatch_for_ever(groups)
        except BaseExceptionGroup as group:
            failure = first_error(group) if self._failure is None else self._failure
        finally:
            while self._again:
                self._slots.give_up(self._again.popleft()[0])
        raise failure

    async def _dispatch_for_ever(self, groups: asyncio.TaskGroup) -> None:
        try:
            while True:
                # Whatever opens a gate changes its state first and sets the event later, in this loop.
                self._wake.clear()
                if not self._dispatch(groups):
                    await self._wake.wait()
        except Exception as error:
            self._failure = error
            raise

    def _dispatch(self, groups: asyncio.TaskGroup) -> bool:
        """Dispatch one group if every gate is open."""
        if self._responder.is_held and self._recorded is None:
            self.waiting_for = "the weight update"
        elif len(self._running) >= self._config.inflight_capacity:
            self.waiting_for = "an in-flight permit"
        elif self._again and self._again[0][0].draw in self._running:
            # finished and found too old in the same turn of the loop
            self.waiting_for = "the end of a task"
        elif self._again:
            self._start(groups, *self._again.popleft())
            return True
        elif not self._buffer.has_room:
            self.waiting_for = "a buffer slot"
        else:
            version = self.version
            admission = self._sampler.admit(version)
            if admission is not None:
                self._start_new(groups, admission)
                return True
            self._shut_at = version
            self.waiting_for = "the next policy version"
        return False

    def _start_new(self, groups: asyncio.TaskGroup, admission: Admission) -> None:
        # one state for whoever takes a snapshot: the draw is handed out and has its slot
        with self._buffer.changed:
            draw = self._slots.draw(admission.draw)
            recorded = None if self._recorded is None else self._recorded.group(draw)
            if recorded is not None:
                self._slots.fill(recorded)
                self._committed(recorded)
                return
            slot = self._slots.reserve(draw, self.version, admission.target_step)
        self._start(groups, slot, {})

    def _start(self, groups: asyncio.TaskGroup, slot: PendingGroup, finished: Mapping[int, Trajectory]) -> None:
        self.waiting_for = "nothing"
        if slot.start_version < self._oldest_allowed:
            finished = {}
        if not finished and slot.start_version != self.version:
            # it waited for its dispatch while versions went by
            slot = self._buffer.regenerate(slot.draw, self.version)
        size = self._config.num_generations_per_prompt
        work = GroupTask(
            self._responder,
            slot.prompt,
            slot.draw,
            slot.group_id,
            self._sampling,
            size,
            self._run_seed,
            self._budget,
            finished,
            first_attempt=self._attempts.pop(slot.draw, 0),
        )
        names = [f"{slot.group_id}_g{index}" for index in range(size) if index not in work.finished]
        self._responder.announce(names)
        task = groups.create_task(self._group(slot, work))
        self._running[slot.draw] = task, work
        task.add_done_callback(partial(self._ended, slot, work, names))

    async def _group(self, slot: PendingGroup, work: GroupTask) -> None:
        try:
            trajectories = await work.run()
        except DroppedPrompt as dropped:
            self._drop(slot, dropped.reason)
            return
        self._budget.committed(slot.draw)
        self._committed(self._slots.commit(slot, trajectories, self.version))

    def _committed(self, group: PromptGroup) -> None:
        self.commits += 1
        self._on_commit(group)

    def _drop(self, slot: PendingGroup, reason: str) -> None:
        with self._buffer.changed:
            self._slots.skip(slot, reason)
            if self._config.failures.drop == "replace":
                replacement = self._slots.reserve(self._slots.draw(None), self.version, slot.target_step)
            else:
                self.dropped[slot.target_step] += 1
                self._buffer.changed.notify_all()
                return
        self._again.append((replacement, {}))

    def _ended(self, slot: PendingGroup, work: GroupTask, names: list[str], task: "asyncio.Task[None]") -> None:
        self._responder.forget(names)
        del self._running[slot.draw]
        was_cancelled, was_outdated = task.cancelled(), slot.draw in self._outdated
        self._outdated.discard(slot.draw)
        error = None if was_cancelled else task.exception()
        if error is not None and self._failure is None:
            self._failure = error
        # an outdated one may have been finished in the same turn of the loop: its age decides as for any other
        if was_cancelled and was_outdated:
            self._attempts[slot.draw] = work.next_attempt
            self._again.append((self._slots.restart(slot, self.version), {}))
        elif was_cancelled or error is not None:
            self._slots.give_up(slot)
        self._wake.set()
