"""What a failed rollout costs: attempts with back-off, budgets of dropped prompts."""

import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning_ppo.batch import FailureCounts
from lightning_ppo.errors import CheckpointError, StepError
from lightning_ppo.rollout.failure_class import FailureClass, classify
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.validation import require

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """Sample the response again."""

    delay_s: float
    """Seconds to wait before."""


@dataclass(frozen=True)
class Drop:
    """Give the prompt up, and go on without it."""

    reason: str
    """One line."""


class FailureBudget:
    """Counts failures, and decides after each: another attempt, a dropped prompt, or the end of the run.

    Attempts are counted per response and class; siblings that fail together in one outage are one attempt at their
    prompt, not many. A prompt is used up with the first response that is. Runs in the collector's event loop;
    `state_dict` may be called from any thread.

    Args:
        config: Attempts, back-off and drop budgets.
        what: What its numbers stand for, for messages.
    """

    def __init__(self, config: FailureConfig, what: str = "draw") -> None:
        self._config = config
        self._what = what
        self._attempts: dict[int, dict[tuple[int, FailureClass], int]] = {}
        self._consecutive = 0
        self.dropped = {FailureClass.DATA: 0, FailureClass.INFRA: 0}
        """Prompts dropped so far, before a restart included."""
        self.retries = 0
        """Attempts granted so far, since the process started."""

    @property
    def counts(self) -> FailureCounts:
        """Retries and drops so far."""
        return FailureCounts(self.retries, sum(self.dropped.values()))

    def decide(self, draw: int, error: BaseException, index: int = 0) -> Retry | Drop:
        """Decide what follows a failed attempt.

        Args:
            draw: Draw of the prompt.
            error: What the attempt raised.
            index: Number of the response within its group.

        Returns:
            `Retry` after min(backoff_s * 2**(k-1), max_backoff_s) seconds for the k-th failure of its class, or `Drop`,
            which the budget has paid for.

        Raises:
            BaseException: `error` itself, with a note, when it is FATAL, or attempts and drop budget are used up.
        """
        granted = self._grant(draw, error, index)
        if isinstance(granted, Retry):
            return granted
        config, (kind, tried) = self._config, granted
        if config.drop == "fail":
            self._end(draw, index, error, f"{tried}, and failures.drop=fail ends the run")
        if kind is FailureClass.INFRA:
            name, left = "max_consecutive_dropped_prompts", config.max_consecutive_dropped_prompts - self._consecutive
        else:
            name, left = "max_dropped_prompts", config.max_dropped_prompts - self.dropped[kind]
        if left <= 0:
            self._end(draw, index, error, f"{tried}, and failures.{name}={getattr(config, name)} is used up as well")
        self._consecutive += kind is FailureClass.INFRA
        self.dropped[kind] += 1
        del self._attempts[draw]
        _log.warning("draw %d is dropped: response %d %s, last with %s", draw, index, tried, _one_line(error))
        return Drop(f"{kind}: {tried}, last with {_one_line(error)}")

    def retry(self, draw: int, error: BaseException, index: int = 0) -> Retry:
        """Decide as `decide` does, where no prompt may be dropped.

        Raises:
            BaseException: `error` itself, with a note, when it is FATAL, or attempts are used up.
        """
        granted = self._grant(draw, error, index)
        if not isinstance(granted, Retry):
            self._end(draw, index, error, granted[1])
        return granted

    def committed(self, draw: int) -> None:
        """Forget the failures of a draw whose group is complete; drops for infrastructure are in a row no more."""
        self._attempts.pop(draw, None)
        self._consecutive = 0

    def state_dict(self) -> dict[str, int]:
        """Return what was dropped. Attempts are not kept: a restarted run tries every prompt afresh."""
        state = {f"dropped_{kind}": count for kind, count in self.dropped.items()}
        return state | {"consecutive_dropped": self._consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where a saved run stopped.

        Raises:
            CheckpointError: the state is not what `state_dict` returns; nothing was loaded.
        """
        wanted = self.state_dict().keys()
        if state.keys() != wanted or not all(type(count) is int and count >= 0 for count in state.values()):
            raise CheckpointError(f"the checkpoint's dropped prompts are {state}, not counts of {', '.join(wanted)}")
        self.dropped = {kind: state[f"dropped_{kind}"] for kind in self.dropped}
        self._consecutive = state["consecutive_dropped"]

    def _grant(self, draw: int, error: BaseException, index: int) -> Retry | tuple[FailureClass, str]:
        """Count a failed attempt, and grant another one or say of which class all are used up."""
        kind = classify(error)
        if kind is FailureClass.FATAL:
            self._end(draw, index, error, "is fatal and never tried again")
        config = self._config
        counts = self._attempts.setdefault(draw, {})
        failed = counts[index, kind] = counts.get((index, kind), 0) + 1
        allowed = config.max_infra_attempts if kind is FailureClass.INFRA else config.max_data_attempts
        if failed >= allowed:
            return kind, f"used up failures.max_{kind}_attempts={allowed}"
        delay_s = min(config.backoff_s * 2.0 ** min(failed - 1, 1000), config.max_backoff_s)
        self.retries += 1
        place = f"{self._what} {draw}, response {index}"
        _log.info("%s: attempt again in %g s after %s", place, delay_s, _one_line(error))
        return Retry(delay_s)

    def _end(self, draw: int, index: int, error: BaseException, why: str) -> NoReturn:
        start = f"rollout of {self._what} "
        # A dead engine fails every group with the same object; the first one to see it says enough.
        if not any(note.startswith(start) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{start}{draw}, response {index}: this {why}")
        raise error


def check_drops(
    config: FailureConfig,
    *,
    samplers_stamp: bool,
    align: int,
    groups_per_step: int,
    generations: int,
    row_multiple: int | None = None,
) -> None:
    """Check that steps may get shorter, where `failures.drop=skip` makes them.

    Dropped prompts leave any number of groups, so that every number must divide over ranks and micro-batches: align 1,
    which holds exactly if the row multiple m divides G. The smallest such G' >= G is ceil(G / m) * m. G and align do
    not determine m (G=6 and align=2 come from m=4 and from m=12), but it always divides G * align.

    Args:
        config: What is checked.
        samplers_stamp: Whether the sampler gives every group a target step; else no step can know that it lost one.
        align: See `group_alignment`.
        groups_per_step: P.
        generations: G, rows per group.
        row_multiple: m, `group_alignment(generations=1, ...)`; without it the message names G * align.

    Raises:
        ConfigError: `drop=skip` with a sampler that stamps no targets, with one group per step, or with align > 1.
        ValueError: `row_multiple` and `align` contradict each other.
    """
    if row_multiple is not None and row_multiple // math.gcd(row_multiple, generations) != align:
        raise ValueError(f"row_multiple={row_multiple} and generations={generations} do not give align={align}")
    if config.drop != "skip":
        return
    instead = "set failures.drop=replace"
    why = "needs a sampler that gives every group its step"
    require(samplers_stamp, "failures.drop", "skip", why, f"set sampler=in_order, or {instead}")
    require(groups_per_step > 1, "failures.drop", "skip", "leaves nothing of a step of one group", instead)
    multiple = generations * align if row_multiple is None else row_multiple
    enough = -(-generations // multiple) * multiple
    why = f"leaves steps that do not divide over ranks and micro-batches, which share multiples of {align} groups"
    require(align == 1, "failures.drop", "skip", why, f"set num_generations_per_prompt={enough}, or {instead}")


def check_length(config: FailureConfig, ppo_step: int, groups_left: int, groups_per_step: int) -> None:
    """Check that dropped prompts left enough of a PPO step.

    Args:
        config: Tells the least.
        ppo_step: The step.
        groups_left: Groups that it will have been trained on.
        groups_per_step: P.

    Raises:
        StepError: they did not.
    """
    least = config.least_groups(groups_per_step)
    if groups_left >= least:
        return
    share = "all of" if groups_left == 0 else f"{groups_per_step - groups_left} of"
    limit = "" if groups_left == 0 else f" and failures.min_step_fraction={config.min_step_fraction} keeps {least},"
    raise StepError(
        f"PPO step {ppo_step} lost {share} its {groups_per_step} prompts to failures.drop=skip,{limit} so that nothing "
        "was updated; look at why they failed, or set failures.drop=replace"
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
