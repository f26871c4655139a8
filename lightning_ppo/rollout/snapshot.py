"""What a checkpoint holds of the rollouts, and what a resumed run takes over from it and from the journal."""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.failures import FailureBudget
from lightning_ppo.rollout.journal import Journal
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.pump import Pump
from lightning_ppo.rollout.recorded_run import RecordedRun
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.restore import RestorePlan, plan_restore
from lightning_ppo.rollout.sampler_protocol import Sampler
from lightning_ppo.rollout.saved_rollouts import PendingDraw, SavedRollouts, decode_rollouts, encode_rollouts
from lightning_ppo.rollout.slots import Slots
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.windows import VersionWindow

_log = logging.getLogger(__name__)

JOURNAL = "journal"
"""Folder of the journal in a run's folder."""


def rollout_fingerprint(
    prompts: PromptSet, run_seed: int, config: RolloutConfig, stop_token_ids: tuple[int, ...]
) -> str:
    """Say what must agree for a rollout to be used in another run."""
    size, sampling = config.num_generations_per_prompt, config.training_sampling(stop_token_ids)
    return f"{prompts.fingerprint} seed={run_seed} generations={size} sampler={config.sampler} {sampling}"


class Snapshots:
    """Saves the rollouts of a run and puts them back.

    Args:
        buffer: Holds the groups.
        prompts: The data set.
        stream: Knows what became of each prompt.
        pump: Generates what has to be generated again.
        budget: Counts dropped prompts.
        sampler: Whose groups they are.
        config: Settings.
        window: How old a rollout may be.
        fingerprint: See `rollout_fingerprint`.
        directory: The run's folder; None keeps no journal.
        recorded: An earlier run that is repeated.
    """

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        prompts: PromptSet,
        stream: PromptStream,
        pump: Pump,
        budget: FailureBudget,
        sampler: Sampler,
        config: RolloutConfig,
        window: VersionWindow,
        fingerprint: str,
        directory: Path | None,
        recorded: RecordedRun | None = None,
    ) -> None:
        self._buffer = buffer
        self._slots = Slots(buffer, prompts, stream)
        self._prompts = prompts
        self._stream = stream
        self._pump = pump
        self._budget = budget
        self._sampler = sampler
        self._config = config
        self._window = window
        self._fingerprint = fingerprint
        self._recorded = recorded
        self._directory = None if directory is None or not config.journal else directory / JOURNAL
        self._journal: Journal | None = None
        if self._directory is not None:
            self._journal = Journal(self._directory, fingerprint, config.record_rollouts)
        self._loaded: dict[str, Any] | None = None
        """What `load` got, until `restore` has put it back."""
        self._saved = SavedRollouts()
        self._lost: dict[int, int] = {}
        """Groups that steps to come had lost for good at the checkpoint (`failures.drop=skip`)."""
        self._found: list[PromptGroup] = []
        """What the journal beside the loaded checkpoint holds."""
        self._checkpoints: deque[int] = deque(maxlen=2)

    def append(self, group: PromptGroup) -> None:
        """Put a finished group into the journal."""
        if self._journal is not None:
            self._journal.append(group, self._pump.version)

    def trim(self, ppo_step: int) -> None:
        """Drop parts of the journal that neither the checkpoint of this step, now written, nor the last one needs."""
        if ppo_step in self._checkpoints:
            return
        self._checkpoints.append(ppo_step)
        if self._journal is not None and len(self._checkpoints) == self._checkpoints.maxlen:
            self._journal.trim(self._checkpoints[0])

    def save(self) -> dict[str, Any]:
        """Return everything for a checkpoint, at one moment; groups in training count as ready."""
        if self._loaded is not None:
            return self._loaded
        with self._buffer.changed:
            ready = sorted((*self._buffer.ready(), *self._buffer.claimed()), key=lambda group: group.draw)
            in_flight = [
                PendingDraw(
                    slot.draw,
                    slot.prompt.row,
                    slot.target_step,
                    slot.start_version,
                    self._pump.finished_siblings(slot.draw),
                )
                for slot in self._buffer.pending()
            ]
            lineage = None if self._journal is None else self._journal.lineage
            group_size = self._config.num_generations_per_prompt
            return {
                "stream": self._stream.state_dict(),
                "prompts": self._prompts.fingerprint,
                "fingerprint": self._fingerprint,
                "sampler": self._config.sampler,
                "dropped": self._budget.state_dict(),
                "lost": [[step, count] for step, count in self._pump.dropped.items() if step is not None],
                "journal": "" if self._directory is None else str(self._directory.absolute()),
                "rollouts": encode_rollouts(ready, in_flight, self._prompts, group_size, lineage),
            }

    def load(self, state: Mapping[str, Any]) -> None:
        """Check everything, then continue with the saved ledger; `restore` puts the rollouts back.

        Raises:
            CheckpointError: the state is damaged, or belongs to other prompts, seed or shuffle setting, or the journal
                beside the checkpoint is damaged (`restore=none` does without it); nothing was loaded.
        """
        if state.get("prompts") != self._prompts.fingerprint:
            raise CheckpointError("the prompts differ from those of the checkpoint; resume with the same data set")
        before = self._stream.state_dict()
        self._stream.load_state_dict(state.get("stream", {}))
        try:
            saved = self._decode(state)
            found = self._read_journal(state, saved)
            if "dropped" in state:
                self._budget.load_state_dict(state["dropped"])
        except CheckpointError:
            self._stream.load_state_dict(before)
            raise
        self._saved, self._found = saved, found
        if saved.lineage or saved.ready or saved.in_flight:
            self._lost = dict(state.get("lost", []))
        self._loaded = dict(state)

    def restore(self, ppo_step: int, version: int) -> list[int | None]:
        """Put the loaded rollouts back, as far as they are of use.

        Args:
            ppo_step: The step that trains next.
            version: The policy version that it trains.

        Returns:
            The target step of every group that has a slot now, or had one and was lost for good.

        Raises:
            CheckpointError: the checkpoint does not fit the run that is repeated.
        """
        if self._loaded is None and self._recorded is None:
            return []
        saved = self._saved
        plan = self._plan(ppo_step, version)
        with self._buffer.changed:
            for group in plan.ready:
                self._slots.draw(group.draw)
                self._slots.fill(group)
            for item in plan.pending:
                start = item.start_version if item.finished else version
                slot = self._slots.reserve(self._slots.draw(item.draw), start, item.target_step)
                self._pump.dispatch_again(slot, item.finished)
        if self._journal is not None and self._loaded is not None:
            self._journal.fork(plan.ready, ppo_step, saved.lineage, version)
        self._loaded, self._saved, self._found = None, SavedRollouts(), []
        if plan.ready or plan.pending:
            _log.info("took over %d finished groups; %d are generated again", len(plan.ready), len(plan.pending))
        taken = [*(group.target_step for group in plan.ready), *(item.target_step for item in plan.pending)]
        lost = self._still_lost(ppo_step, taken)
        self._pump.dropped.update(lost)
        return taken + list(lost.elements())

    def close(self) -> None:
        """Close the journal; safe to call twice."""
        if self._journal is not None:
            self._journal.close()

    def _plan(self, ppo_step: int, version: int) -> RestorePlan:
        config, saved, is_done = self._config, self._saved, self._stream.ledger.is_done
        if self._recorded is not None:
            groups = (*saved.ready, *self._found) if self._recorded.generates else ()
            return RestorePlan(ready=self._recorded.take_over(groups, ppo_step, version, is_done))
        return plan_restore(
            saved.ready,
            self._found,
            saved.in_flight,
            is_done=is_done,
            ppo_step=ppo_step,
            policy_version=version,
            window=self._window,
            is_on_policy=self._sampler.is_on_policy,
            mode=config.restore,
            groups_per_step=config.num_prompts_per_step,
            capacity=config.buffer_capacity,
            group_size=config.num_generations_per_prompt,
        )

    def _still_lost(self, ppo_step: int, taken: Iterable[int | None]) -> Counter[int | None]:
        """Return the groups that each step to come lacks for good: a smaller step may have enough without them."""
        size, held = self._config.num_prompts_per_step, Counter(taken)
        lost: Counter[int | None] = Counter()
        for step, count in self._lost.items():
            if step >= ppo_step:
                lost[step] = max(0, min(count, size - max(1, held[step])))
        return lost

    def _decode(self, state: Mapping[str, Any]) -> SavedRollouts:
        config = self._config
        if config.restore == "none" or "rollouts" not in state:
            return SavedRollouts()
        size = config.num_generations_per_prompt
        saved = decode_rollouts(state["rollouts"], self._prompts, size, self._stream.row_of)
        why = ""
        if state.get("sampler") != config.sampler:
            why = f"they were drawn by sampler={state.get('sampler')}, this run has {config.sampler}"
        elif not self._sampler.capabilities.supports_restore:
            why = f"sampler={config.sampler} cannot take them over"
        elif state.get("fingerprint") != self._fingerprint:
            why = "they were sampled with other settings"
        if why:
            _log.warning("saved rollouts are generated again: %s", why)
            return SavedRollouts()
        return saved

    def _read_journal(self, state: Mapping[str, Any], saved: SavedRollouts) -> list[PromptGroup]:
        folder = state.get("journal")
        unwanted = self._config.restore == "none" or not saved.lineage
        if not folder or unwanted or not self._sampler.capabilities.supports_restore:
            return []
        if not Path(folder).is_dir():
            _log.info("journal %s is not there any more: what it held is generated again", folder)
            return []
        return Journal.read(Path(folder), self._fingerprint, self._prompts, self._stream.row_of, saved.lineage)
