"""Samplers: when a group may be dispatched, and which finished groups a PPO step may train.

Source: `behaviour.md` sections 1.2 and 1.3 (`in_order`, `ready_first`), own words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.validation import check_count


@dataclass(frozen=True)
class Admission:
    """Leave to dispatch one group."""

    target_step: int | None
    """The PPO step that must train the group, or None for any."""


@runtime_checkable
class Sampler(Protocol):
    """Decides on dispatch (event loop) and on selection (trainer). Neither method may block."""

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is trained by the version that dispatched it."""
        ...

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the fewest buffer slots with which generation cannot deadlock."""
        ...

    def seed_dispatch(self, resume_step: int, version: int) -> None:
        """Continue at PPO step `resume_step`, whose rollouts are the first of policy `version`; 0, 0 is a fresh start.

        Raises:
            ConfigError: a number is negative.
        """
        ...

    def admit(self, version: int) -> Admission | None:
        """Admit the next group while the trainer is at `version`; None: ask again when the version changes."""
        ...

    def eligible(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups that `ppo_step` may train now, in the order in which to take them."""
        ...


class _GatedSampler:
    """Admits batches of `groups_per_step` groups: batch i of a run opens when version i - window is published.

    Args:
        groups_per_step: P, groups of one batch.
        window: `max_lookahead_versions`: batches that may be dispatched ahead of the trainer.
    """

    def __init__(self, groups_per_step: int, window: int) -> None:
        check_count("num_prompts_per_step", groups_per_step)
        check_count("max_lookahead_versions", window, 0)
        self._groups_per_step = groups_per_step
        self._window = window
        self._admitted = 0
        self._first_step = 0
        self._first_version = 0

    @property
    def is_on_policy(self) -> bool:
        """Whether the window is 0."""
        return self._window == 0

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the live batch plus the batches ahead of it: P * (window + 1)."""
        return groups_per_step * (self._window + 1)

    def seed_dispatch(self, resume_step: int, version: int) -> None:
        """Continue at PPO step `resume_step` and policy `version`; the gate then admits window + 1 batches.

        Raises:
            ConfigError: a number is negative.
        """
        check_count("resume_step", resume_step, 0)
        check_count("version", version, 0)
        self._admitted = 0
        self._first_step = resume_step
        self._first_version = version

    def _next_batch(self, version: int) -> int | None:
        """Return the PPO step whose batch the next group belongs to, and count it; None while the gate is shut."""
        batch = self._admitted // self._groups_per_step
        if batch > version - self._first_version + self._window:
            return None
        self._admitted += 1
        return self._first_step + batch


class InOrderSampler(_GatedSampler):
    """Every group is trained in the PPO step it was dispatched for: target step = step of its batch.

    Args:
        groups_per_step: P, groups of one batch.
        window: `max_lookahead_versions`.
    """

    def admit(self, version: int) -> Admission | None:
        """Admit the next group of the current batch, stamped with its step."""
        batch = self._next_batch(version)
        return None if batch is None else Admission(target_step=batch)

    def eligible(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return the ready groups stamped with `ppo_step`, in dispatch order; start versions do not matter."""
        return [group for group in buffer.ready() if group.target_step == ppo_step]


class ReadyFirstSampler(_GatedSampler):
    """Whatever is finished first is trained first, however old: nothing is stamped and nothing is dropped.

    Args:
        groups_per_step: P, groups of one batch.
        window: `max_lookahead_versions`.
    """

    def admit(self, version: int) -> Admission | None:
        """Admit the next group through the same gate, without a stamp."""
        return None if self._next_batch(version) is None else Admission(target_step=None)

    def eligible(self, buffer: ReplayBuffer, version: int, ppo_step: int) -> Sequence[PromptGroup]:
        """Return every ready group of this or an earlier version, in dispatch order."""
        return [group for group in buffer.ready() if group.start_version <= version]


def make_sampler(config: RolloutConfig) -> Sampler:
    """Build the sampler that `config.sampler` names."""
    kinds: dict[str, type[InOrderSampler] | type[ReadyFirstSampler]]
    kinds = {"in_order": InOrderSampler, "ready_first": ReadyFirstSampler}
    return kinds[config.sampler](config.num_prompts_per_step, config.max_lookahead_versions)
