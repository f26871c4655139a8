"""Errors that a user can meet. Every message is one line: what is wrong, then what to set instead."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, is not supported; raised before any process starts."""


class DataError(ValueError):
    """A prompt file or a row of it cannot be used; the message names the row."""


class RewardError(RuntimeError):
    """The reward function raised, or returned something that is not a finite number; the message names the prompt."""


class EngineError(RuntimeError):
    """A generation engine failed to start, to answer in time, or to take new weights."""


class EngineDiedError(EngineError):
    """A generation engine's process is gone; the message ends with the last lines of its log."""


class RolloutError(RuntimeError):
    """Rollouts stopped: nothing can become ready any more, or nothing did within the deadline."""


class StepError(RuntimeError):
    """A PPO step cannot be completed: nothing to train, a loss or gradient that is not finite, or a diverged model.

    Neither generators nor checkpoints have got anything of a failed update; resume from the last checkpoint.
    """


class UpdateInProgressError(RuntimeError):
    """Something that would destroy accumulated gradients was asked for while a PPO step is open."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written now, or does not fit together; nothing was loaded."""
