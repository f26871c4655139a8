"""The next chunk of a PPO step: the sampler's order, cut by the tail rule or by a recorded schedule."""

from lightning_ppo.batch import PromptGroup
from lightning_ppo.errors import DataError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import Sampler
from lightning_ppo.rollout.schedule import ChunkSchedule
from lightning_ppo.rollout.tail import check_alignment, choose
from lightning_ppo.validation import require


class Selection:
    """Picks ready groups; changes nothing.

    Args:
        buffer: Where the groups are.
        sampler: Which of them a step may train.
        config: Step size and minimum.
        align: Every chunk is a multiple of this many groups.
        schedule: Recorded chunks to use; None: those of `config.replay_chunks`, or whatever is finished.

    Raises:
        ConfigError: the buffer is smaller than the sampler needs, `num_prompts_per_step` is no multiple of `align`, or
            the run streams and the sampler does not support that.
        DataError: `config.replay_chunks` cannot be read.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        sampler: Sampler,
        config: RolloutConfig,
        align: int,
        schedule: ChunkSchedule | None,
    ) -> None:
        self._step_size = config.num_prompts_per_step
        need = sampler.required_capacity(self._step_size)
        why = "is smaller than what the sampler needs: generation would deadlock"
        require(config.buffer_capacity >= need, "max_buffered_rollouts", config.buffer_capacity, why, f"set >= {need}")
        check_alignment(self._step_size, align)
        require(
            sampler.capabilities.supports_streaming or not config.is_streaming,
            "min_groups_for_streaming_train",
            config.min_groups_for_streaming_train,
            f"streams, which sampler={config.sampler} does not support",
            f"set {self._step_size}, for full-batch mode",
        )
        if schedule is None and config.replay_chunks is not None:
            schedule = ChunkSchedule.load(config.replay_chunks)
        self._buffer = buffer
        self._sampler = sampler
        self._minimum = config.min_groups_for_streaming_train
        self._streaming = config.is_streaming
        self._align = align
        self._schedule = schedule

    def check(self, ppo_step: int, remaining: int) -> None:
        """Check that a chunk can exist before anyone waits for it.

        Raises:
            ValueError: `remaining` is not in 1..num_prompts_per_step.
            DataError: the recorded schedule does not fit this step.
        """
        if not 1 <= remaining <= self._step_size:
            raise ValueError(f"remaining={remaining} is not in 1..{self._step_size}")
        self._recorded(ppo_step, remaining)

    def pick(self, ppo_step: int, remaining: int, version: int) -> tuple[PromptGroup, ...]:
        """Return the next chunk in draw order, or nothing while it is not ready.

        Args:
            ppo_step: The step that trains it.
            remaining: Groups of this step that were not handed out yet.
            version: The published policy version.

        Raises:
            DataError: a recorded chunk holds a group that is stamped for another step.
        """
        recorded = self._recorded(ppo_step, remaining)
        if recorded is not None:
            chosen = self._find(recorded, ppo_step)
        else:
            # The tail rule never takes more than remain, and does not ask what else is ready.
            eligible = self._sampler.select(self._buffer, version, ppo_step, remaining)
            take = choose(
                len(eligible), remaining, min_groups=self._minimum, align=self._align, streaming=self._streaming
            )
            chosen = list(eligible[:take])
        return tuple(sorted(chosen, key=lambda group: group.draw))

    def check_coming(self, ppo_step: int, remaining: int) -> None:
        """Check that the next chunk becomes ready, now that nothing more is dispatched before the step is over.

        Args:
            ppo_step: The step that waits for it.
            remaining: Groups of this step that were not handed out yet.

        Raises:
            DataError: a recorded chunk holds a draw that is neither ready nor being generated.
        """
        for draw in self._recorded(ppo_step, remaining) or ():
            if self._buffer.index.find_ready(draw) is None and not self._buffer.is_pending(draw):
                raise DataError(
                    f"recorded PPO step {ppo_step} trains draw {draw}, which this run does not start before that step "
                    "is over; replay with the sampler, the lookahead and the buffer of the recorded run"
                )

    def _find(self, draws: tuple[int, ...], ppo_step: int) -> list[PromptGroup]:
        found = [group for group in map(self._buffer.index.find_ready, draws) if group is not None]
        for group in found:
            if group.target_step not in (None, ppo_step):
                raise DataError(
                    f"recorded PPO step {ppo_step} trains draw {group.draw}, which is stamped for step "
                    f"{group.target_step}; replay with the sampler and the step size of the recorded run"
                )
        return found if len(found) == len(draws) else []

    def _recorded(self, ppo_step: int, remaining: int) -> tuple[int, ...] | None:
        if self._schedule is None:
            return None
        consumed = self._step_size - remaining
        return self._schedule.next_chunk(ppo_step, consumed, self._step_size, self._align)
