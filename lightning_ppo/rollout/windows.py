"""How far generation may run ahead of training, and how old a rollout may get; pure arithmetic on versions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_ppo.validation import check_count, require

if TYPE_CHECKING:
    from lightning_ppo.rollout.config import RolloutConfig


def check_window(lookahead: int, max_age: int, warmup_lead: int | None) -> None:
    """Check what holds whether or not there is a critic warm-up; arguments as in `VersionWindow`.

    Raises:
        ConfigError: a number is negative, the lookahead is above the age, or the warm-up lead is below the age.
    """
    check_count("max_lookahead_versions", lookahead, 0)
    check_count("max_trajectory_age_steps", max_age, 0)
    age = f"max_trajectory_age_steps={max_age}"
    why = f"is above {age}: rollouts would be too old"
    require(lookahead <= max_age, "max_lookahead_versions", lookahead, why, "set max_trajectory_age_steps as high")
    if warmup_lead is not None:
        check_count("warmup_generation_lead_steps", warmup_lead, 0)
        floor = f"set >= {max_age}, or None"
        require(warmup_lead >= max_age, "warmup_generation_lead_steps", warmup_lead, f"is below {age}", floor)


@dataclass(frozen=True)
class VersionWindow:
    """Lead and age of rollouts, critic warm-up included.

    Policy version and PPO step move together: version v trains PPO step v. In critic warm-up the versions 0 to W are
    the same policy, so that rollouts may be banked: up to step W + A a rollout of the frozen policy is at most A
    updates old.

    Source: `behaviour.md` 3.1 and 3.2 (NeMo-RL's asynchronous PPO), own words.

    Raises:
        ConfigError: a number is negative, the lookahead is above the age, the warm-up lead is below the age, or a
            warm-up lead is given without warm-up.
    """

    lookahead: int
    """`max_lookahead_versions`: PPO steps that generation may run ahead once the policy is trained."""
    max_age: int
    """A, `max_trajectory_age_steps`: policy updates that a trained rollout may be old."""
    warmup_steps: int = 0
    """W, `critic_warmup_steps`: the first steps, which leave the policy as it is."""
    warmup_lead: int | None = None
    """L, `warmup_generation_lead_steps`: as `lookahead`, in warm-up; None means `lookahead`."""

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_window(self.lookahead, self.max_age, self.warmup_lead)
        check_count("critic_warmup_steps", self.warmup_steps, 0)
        if self.warmup_lead is not None:
            why, more = "has no effect without critic warm-up", "set critic_warmup_steps > 0, or None"
            require(self.warmup_steps > 0, "warmup_generation_lead_steps", self.warmup_lead, why, more)

    @classmethod
    def of(cls, config: "RolloutConfig", warmup_steps: int) -> "VersionWindow":
        """Build the window of a run.

        Args:
            config: Lookahead, age and warm-up lead.
            warmup_steps: `critic_warmup_steps` of the PPO step.

        Raises:
            ConfigError: see the class.
        """
        return cls(
            lookahead=config.max_lookahead_versions,
            max_age=config.max_trajectory_age_steps,
            warmup_steps=warmup_steps,
            warmup_lead=config.warmup_generation_lead_steps,
        )

    def lead(self, version: int) -> int:
        """Return how many PPO steps generation may run ahead while the trainer is at `version`.

        The lookahead from W on; before, max(lookahead, min(L, W + A - version)).
        """
        if version >= self.warmup_steps or self.warmup_lead is None:
            return self.lookahead
        return max(self.lookahead, min(self.warmup_lead, self.warmup_steps + self.max_age - version))

    @property
    def peak_lead(self) -> int:
        """The highest lead of the run: it never rises, so that it is the first one."""
        return self.lead(0)

    @property
    def peak_policy_age(self) -> int:
        """The highest policy age at which a group is trained if every step trains the groups dispatched for it.

        Off-policy without any lookahead: what was banked just before W for a step after it.
        """
        last_frozen = self.warmup_steps - 1
        banked = self.policy_age(last_frozen + self.lead(last_frozen), last_frozen) if self.warmup_steps else 0
        return max(self.lookahead, banked)

    def policy_age(self, trained_version: int, sampled_version: int) -> int:
        """Return how many policy updates lie between two versions: max(0, v - W) - max(0, g - W)."""
        return max(0, trained_version - self.warmup_steps) - max(0, sampled_version - self.warmup_steps)

    def oldest_allowed(self, version: int, max_age: int | None = None) -> int:
        """Return the lowest version whose policy age at `version` is at most A.

        The bound is inclusive: what the frozen policy sampled is allowed at W + A still, where nobody could make it
        again in time.

        Args:
            version: The version that trains.
            max_age: Another A.
        """
        age = self.max_age if max_age is None else max_age
        return 0 if version <= self.warmup_steps + age else version - age
