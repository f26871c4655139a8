"""What happens when a rollout fails: retries, drops, stalls. A frozen dataclass that checks itself."""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_ppo.validation import check_choices, check_count, check_number, require

StallAction = Literal["abort", "warn"]


@dataclass(frozen=True)
class FailureConfig:
    """Budgets for failing rollouts.

    An error is *infrastructure* (timeouts, connections, a server or actor that died, HTTP 408, 429 and 5xx, also as the
    cause of another error) or *data* (everything else, for example a reward function that raises). A dead engine that
    cannot be replaced ends the run at once.

    Args:
        max_infra_attempts: Attempts at a response, the first included, after which failures of infrastructure use its
            prompt up. Finished responses of the same prompt are kept meanwhile.
        max_data_attempts: The same for failures because of its data.
        backoff_s: Wait before the second attempt; doubles with every further one.
        max_backoff_s: Longest such wait.
        drop: What happens to a prompt whose attempts are used up: `fail` ends the run with its error, `skip` closes the
            PPO step without it, `replace` trains the next prompt in its place. Never is it trained with a reward of 0.
        max_dropped_prompts: Prompts that may be dropped over the whole run because of their data.
        max_consecutive_dropped_prompts: Prompts that may be dropped in a row because of infrastructure; any finished
            prompt starts the count anew.
        min_step_fraction: Share of a PPO step's prompts that `drop: skip` must leave, rounded up; one that gets smaller
            ends the run without an update. 0 lets a step shrink to one prompt. Read by `drop: skip` only.
        stall_action: What happens when no prompt group was finished for `timeout_s`: `abort` ends the run, `warn` says
            so and waits on.
    """

    max_infra_attempts: int = 5
    max_data_attempts: int = 2
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    drop: Literal["fail", "skip", "replace"] = "fail"
    max_dropped_prompts: int = 0
    max_consecutive_dropped_prompts: int = 0
    min_step_fraction: float = 0.5
    stall_action: StallAction = "abort"

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self, "failures.")
        check_count("failures.max_infra_attempts", self.max_infra_attempts)
        check_count("failures.max_data_attempts", self.max_data_attempts)
        check_number("failures.backoff_s", self.backoff_s, 0)
        check_number("failures.max_backoff_s", self.max_backoff_s, 0)
        require(
            self.backoff_s <= self.max_backoff_s,
            "failures.backoff_s",
            self.backoff_s,
            f"is above max_backoff_s={self.max_backoff_s}",
            "set backoff_s <= max_backoff_s",
        )
        check_number("failures.min_step_fraction", self.min_step_fraction, 0, 1)
        is_read = self.drop == "skip" or self.min_step_fraction == type(self).min_step_fraction
        why = f"has no effect with drop={self.drop}"
        require(is_read, "failures.min_step_fraction", self.min_step_fraction, why, "set drop=skip, or drop it")
        budgets = ("max_dropped_prompts", "max_consecutive_dropped_prompts")
        for name in budgets:
            check_count(f"failures.{name}", getattr(self, name), 0)
            if self.drop == "fail" and getattr(self, name) > 0:
                require(False, f"failures.{name}", getattr(self, name), "has no effect with drop=fail", "set drop")
        if self.drop != "fail":
            some = any(getattr(self, name) > 0 for name in budgets)
            require(some, "failures.drop", self.drop, "may drop nothing", f"set {' or '.join(budgets)} > 0")

    def least_groups(self, groups_per_step: int) -> int:
        """Return the groups that a step of `groups_per_step` must have left to be trained."""
        # 100 * 0.55 is a little more than 55
        least = math.ceil(round(groups_per_step * self.min_step_fraction, 9))
        return max(1, least) if self.drop == "skip" else groups_per_step
