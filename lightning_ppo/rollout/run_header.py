"""What a run's schedule says about the run itself, so that a replay with other settings is refused at once."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.validation import is_count, reject


@dataclass(frozen=True)
class RunHeader:
    """The settings that decide what is sampled and when; named like the settings. Seeds follow from `seed`."""

    seed: int
    """Of the prompt order and of every response (`stream.sample_seed`)."""
    prompts: str
    """Fingerprint of the data set."""
    shuffle: bool
    num_prompts_per_step: int
    num_generations_per_prompt: int
    sampler: str
    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    max_lookahead_versions: int
    max_trajectory_age_steps: int
    warmup_generation_lead_steps: int | None
    critic_warmup_steps: int
    record_rollouts: bool
    """Whether all responses are in the journal beside the schedule."""
    ppo_step: int = 0
    """The step that the run started with; above 0 it was resumed, and what it did after that step before is void."""
    weights: int | None = None
    """Checksum of the policy that it started with."""

    @classmethod
    def of(
        cls, config: RolloutConfig, *, seed: int, prompts: str, stop_token_ids: tuple[int, ...], warmup_steps: int
    ) -> "RunHeader":
        """Describe a run that starts at step 0.

        Args:
            config: Settings.
            seed: Seed of the run.
            prompts: Fingerprint of the data set.
            stop_token_ids: Tokens that end a response.
            warmup_steps: `critic_warmup_steps`.
        """
        known = {field.name for field in fields(cls)}
        settings = {name: value for name, value in vars(config).items() if name in known}
        settings |= {"seed": seed, "prompts": prompts, "stop_token_ids": stop_token_ids}
        return cls(**settings, critic_warmup_steps=warmup_steps)

    @classmethod
    def from_row(cls, row: Any) -> "RunHeader":
        """Read what `as_row` wrote.

        Raises:
            ValueError: it did not write this.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(row, dict) or set(row) != names:
            raise ValueError("run is not an object with the settings of a run")
        for name, can_lack in (("ppo_step", False), ("weights", True)):
            value = row[name]
            if not (is_count(value, 0) or (can_lack and value is None)):
                raise ValueError(f"{name}={value!r} is not a whole number >= 0")
        tokens = row["stop_token_ids"]
        return cls(**row | {"stop_token_ids": tuple(tokens) if isinstance(tokens, list) else tokens})

    def as_row(self) -> dict[str, Any]:
        """Return the header as it stands in the file."""
        return asdict(self)

    def check(self, recorded: "RunHeader", path: str) -> None:
        """Check that this run can repeat another one.

        Args:
            recorded: The other one.
            path: Its schedule, for messages.

        Raises:
            ConfigError: a setting differs; the message names it, and what it was.
        """
        if self.prompts != recorded.prompts:
            raise ConfigError(f"prompts differ from those of replay_schedule={path}; replay with the same data set")
        for field in fields(self):
            if field.name in ("record_rollouts", "ppo_step", "weights"):
                continue
            now, then = getattr(self, field.name), getattr(recorded, field.name)
            if now != then:
                raise reject(field.name, now, f"differs from that of replay_schedule={path}", f"set {then}")
