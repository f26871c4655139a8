"""What a data module remembers of its last run, so that another `fit` of the same trainer goes on where it ended."""

from typing import Any


class LastRun:
    """Whose run it was, with which seed, and what became of its prompts.

    The trainer tells a run that goes on from a new one: one that failed in its first step has no counter that moved.
    """

    def __init__(self) -> None:
        self.position: dict[str, Any] = {}
        """State of its collector, for a save after `fit` and for another `fit` that goes on; on rank 0."""
        self._trainer: object | None = None
        self._seed: int | None = None

    def began(self, trainer: object, seed: int) -> None:
        """Remember whose rollouts start now; on every rank."""
        self._trainer, self._seed = trainer, seed

    def goes_on(self, trainer: object, completed_steps: int) -> bool:
        """Whether a run of this trainer takes the position over.

        Args:
            trainer: Whose run is prepared.
            completed_steps: PPO steps that it has behind it.
        """
        return bool(self.position) and (completed_steps > 0 or trainer is self._trainer)

    def seed(self, trainer: object, new: int) -> int:
        """Return the seed of a run that is prepared now.

        Args:
            trainer: Whose run is prepared.
            new: The seed of a new run.
        """
        return new if self._seed is None or trainer is not self._trainer else self._seed
