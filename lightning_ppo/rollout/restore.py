"""What a resumed run keeps of the rollouts in its checkpoint and its journal: a pure function, no side effects.

**Nothing is lost.** A draw that is neither trained nor skipped is in the plan as ready or pending, or it is not in the
plan and the prompt stream hands it out again, lowest draw first.

**No bias to short responses.** What is finished when a run dies is what was fast, so a first step built from it would
consist of short responses. With `in_order` that cannot happen: which prompts a step trains was settled when they were
drawn, and stays so. Those of them that were in flight are pending here with the same target step and are generated
again, from the same seeds; finished siblings are kept, never padded or replaced. The step waits for all of them, as it
would have done without the kill, and so consists of the same prompts: its lengths are those of the uninterrupted run up
to the policy version that long responses now start from. `drop_incomplete` generates even the finished groups of such
a step again, so that no response of it was kept because it was fast.

Samplers without target steps (`ready_first`, `windowed`, `weight_fifo`) train what is finished first, killed or not;
fast responses are early by design there. A kill takes the progress of the slow ones away, so the steps right after a
resume lean to short responses more than those of the uninterrupted run, by at most the groups that were ready. Over
the run every prompt is still trained exactly once: slow ones later, none less often. Who cannot accept that uses
`in_order`, or `restore=none`, which generates all of them again.

Source: `behaviour.md` 3.6 (order of the rules), own words; that dropped prompts are generated again, and that capacity
is reserved for the missing groups of earlier steps, differs from there.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.rollout.config import Restore
from lightning_ppo.rollout.saved_rollouts import PendingDraw
from lightning_ppo.rollout.windows import VersionWindow


@dataclass(frozen=True)
class RestorePlan:
    """What occupies a buffer slot when a resumed run starts; no draw is in both."""

    ready: tuple[PromptGroup, ...] = ()
    """Groups to be trained as they are, in order of their draws."""
    pending: tuple[PendingDraw, ...] = ()
    """Prompts to be generated at once, in order of their draws."""


_Kept = dict[int, PromptGroup | PendingDraw]


@dataclass(frozen=True)
class _Limits:
    ppo_step: int
    policy_version: int
    window: VersionWindow
    is_on_policy: bool

    def oldest_allowed(self, target: int | None) -> int:
        """Return the oldest version that a group's own step may train (unstamped: this one)."""
        step = self.ppo_step if target is None else target
        return self.window.oldest_allowed(step, 0 if self.is_on_policy else None)

    def fits(self, group: PromptGroup, target: int | None) -> bool:
        """Whether a group is neither newer than the policy nor too old for its own step."""
        return group.newest_version <= self.policy_version and group.oldest_version >= self.oldest_allowed(target)

    def is_open(self, item: PendingDraw) -> bool:
        """Whether the gate lets groups of this step be dispatched now."""
        last = self.policy_version + self.window.lead(self.policy_version)
        return item.target_step is None or item.target_step <= last


def plan_restore(
    saved: Sequence[PromptGroup],
    journal: Sequence[PromptGroup],
    in_flight: Sequence[PendingDraw],
    *,
    is_done: Callable[[int], bool],
    ppo_step: int,
    policy_version: int,
    window: VersionWindow,
    is_on_policy: bool,
    mode: Restore,
    groups_per_step: int,
    capacity: int,
    group_size: int,
) -> RestorePlan:
    """Decide what a resumed run keeps, by these rules in this order.

    1. Trained and skipped draws are out, and those whose target step has passed (they get a new one).
    2. Of the records of a draw, the last one counts that has `group_size` trajectories and no token of a policy newer
       than the restored one. A draw of the checkpoint without any is generated again; one of the journal alone is
       handed out again. Draws of the checkpoint keep their target step, whatever the journal says.
    3. A group that would be too old in its own step (unstamped: in `ppo_step`) is generated again; finished siblings
       likewise, one by one. In a run on policy any policy update in between is too old, whatever the window allows:
       nothing corrects for it.
    4. A step never gets more than `groups_per_step` groups; draws of the checkpoint go first, then low draws.
    5. `drop_incomplete`: finished groups of steps that are not complete are generated again. Unstamped: those beyond
       the last multiple of `groups_per_step`.
    6. What has to be generated but may not be dispatched yet (the lead was lowered) is handed out again later.
    7. What does not fit into `capacity` is handed out again: steps from `ppo_step` on first, each with room for all its
       groups, so that a step that lacks some cannot be starved by later ones; then low draws.

    Args:
        saved: Finished groups of the checkpoint.
        journal: `Journal.read`, oldest first.
        in_flight: What was in flight at the checkpoint.
        is_done: Whether a draw was trained or skipped (`Ledger.is_done`).
        ppo_step: The step that the run resumes with.
        policy_version: The restored policy.
        window: Lead and age of this run.
        is_on_policy: Whether this run trains what was sampled from the very policy (`Sampler.is_on_policy`).
        mode: `RolloutConfig.restore`; `none` keeps nothing.
        groups_per_step: P.
        capacity: Buffer slots.
        group_size: G.
    """
    if mode == "none":
        return RestorePlan()
    limits = _Limits(ppo_step, policy_version, window, is_on_policy)
    groups, waiting = _candidates(saved, journal, in_flight, limits, group_size)
    kept: _Kept = {}
    for draw in sorted(groups.keys() | waiting.keys()):
        group, old = groups.get(draw), waiting.get(draw)
        target = old.target_step if old is not None else group.target_step if group is not None else None
        if is_done(draw) or (target is not None and target < ppo_step):
            continue
        if group is not None and limits.fits(group, target):
            kept[draw] = dataclasses.replace(group, target_step=target)
        elif old is not None:
            kept[draw] = _again(old, limits)
        elif group is not None:
            kept[draw] = PendingDraw(draw, group.prompt.row, target, policy_version)
    kept = _cap(kept, waiting, groups_per_step)
    if mode == "drop_incomplete":
        kept = _complete_only(kept, groups_per_step, policy_version)
    kept = {draw: item for draw, item in kept.items() if isinstance(item, PromptGroup) or limits.is_open(item)}
    kept = _squeeze(kept, ppo_step, groups_per_step, capacity)
    items = [kept[draw] for draw in sorted(kept)]
    return RestorePlan(
        ready=tuple(item for item in items if isinstance(item, PromptGroup)),
        pending=tuple(item for item in items if isinstance(item, PendingDraw)),
    )


def _candidates(
    saved: Sequence[PromptGroup],
    journal: Sequence[PromptGroup],
    in_flight: Sequence[PendingDraw],
    limits: _Limits,
    group_size: int,
) -> tuple[dict[int, PromptGroup], dict[int, PendingDraw]]:
    """Return the group that counts for each draw, and what is to be generated for the checkpoint's draws without."""
    waiting = {item.draw: item for item in in_flight}
    for group in saved:
        waiting[group.draw] = PendingDraw(group.draw, group.prompt.row, group.target_step, limits.policy_version)
    groups = {
        group.draw: group
        for group in (*saved, *journal)
        if len(group.trajectories) == group_size and group.newest_version <= limits.policy_version
    }
    return groups, waiting


def _again(item: PendingDraw, limits: _Limits) -> PendingDraw:
    """Return a draw to be generated, with those finished siblings that may still be trained."""
    oldest = limits.oldest_allowed(item.target_step)

    def fits(row: Trajectory) -> bool:
        versions = row.policy_versions[row.response_mask]
        low, high = (int(versions.min()), int(versions.max())) if len(versions) else (item.start_version,) * 2
        return oldest <= low and high <= limits.policy_version

    finished = {index: row for index, row in item.finished.items() if fits(row)}
    start_version = min(item.start_version, limits.policy_version) if finished else limits.policy_version
    return dataclasses.replace(item, finished=finished, start_version=start_version)


def _by_target(kept: _Kept) -> dict[int | None, list[int]]:
    targets: dict[int | None, list[int]] = defaultdict(list)
    for draw in sorted(kept):
        targets[kept[draw].target_step].append(draw)
    return targets


def _cap(kept: _Kept, checkpoint: Container[int], groups_per_step: int) -> _Kept:
    """Leave at most `groups_per_step` draws per target step."""
    chosen = set()
    for target, draws in _by_target(kept).items():
        ranked = sorted(draws, key=lambda draw: (draw not in checkpoint, draw))
        chosen.update(draws if target is None else ranked[:groups_per_step])
    return {draw: item for draw, item in kept.items() if draw in chosen}


def _complete_only(kept: _Kept, groups_per_step: int, policy_version: int) -> _Kept:
    """Have everything generated again that does not belong to a complete step."""
    complete = set()
    for draws in _by_target(kept).values():
        ready = [draw for draw in draws if isinstance(kept[draw], PromptGroup)]
        complete.update(ready[: len(ready) // groups_per_step * groups_per_step])
    again = {}
    for draw, item in kept.items():
        row = item.prompt.row if isinstance(item, PromptGroup) else item.row
        again[draw] = item if draw in complete else PendingDraw(draw, row, item.target_step, policy_version)
    return again


def _squeeze(kept: _Kept, ppo_step: int, groups_per_step: int, capacity: int) -> _Kept:
    """Leave what fits, with room for what the steps before lack."""
    chosen: list[int] = []
    for target, draws in sorted(_by_target(kept).items(), key=lambda entry: (entry[0] is None, entry[0] or 0)):
        room = capacity - len(chosen) if target is None else capacity - (target - ppo_step) * groups_per_step
        chosen += draws[: max(0, room)]
    return {draw: kept[draw] for draw in chosen}
