"""What flows from the rollouts to the losses. All frozen; tensors live on the CPU until a micro-batch is built.

Shapes: `L` prompt tokens of one row, `T` response tokens of one row (a ragged `[T]` per row; nothing of a whole step is
ever padded into one tensor).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data set, tokenised."""

    row: int
    """Index of the row in the data set, from 0."""
    text: str
    """What the reward function sees as `prompt`."""
    token_ids: tuple[int, ...]
    """What the engine gets."""
    columns: Mapping[str, Any]
    """The row's other columns, handed to the reward function by name."""


@dataclass(frozen=True)
class Trajectory:
    """One sampled response with its reward."""

    sample_id: str
    """`{group_id}_g{index}`; stable over restarts."""
    prompt_ids: Tensor
    """`[L]` int64."""
    response_ids: Tensor
    """`[T]` int64, the stop token included when there is one."""
    response_mask: Tensor
    """`[T]` bool, True where the policy generated the token (False: text an environment inserted)."""
    rollout_logprobs: Tensor
    """`[T]` float32, log-prob of each token under the distribution it was sampled from; 0 where not generated."""
    policy_versions: Tensor
    """`[T]` int64, the policy version each token was sampled with."""
    reward: float
    """Scalar reward of the whole response."""
    finish_reason: FinishReason
    """`length`: the response hit the token limit (truncated)."""
    response_text: str
    """Decoded response without special tokens, as the reward function saw it."""

    @property
    def truncated(self) -> bool:
        """Whether the response hit the token limit."""
        return self.finish_reason == "length"

    @cached_property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PromptGroup:
    """All responses to one drawn prompt: the atomic unit of replay and selection."""

    group_id: str
    draw: int
    """Position in the endless, seeded sequence of prompts."""
    prompt: Prompt
    target_step: int | None
    """The PPO step that must train this group (`in_order`), or None."""
    start_version: int
    """Policy version when the group was dispatched."""
    end_version: int
    """Policy version when its last response was committed."""
    trajectories: tuple[Trajectory, ...]
    generation_s: float
    """Seconds from dispatch to commit."""

    @cached_property
    def oldest_version(self) -> int:
        """The lowest policy version that any generated token was sampled with; `start_version` if there is no token.

        Responses kept from before a restart are older than `start_version`; responses that went on through weight
        updates are newer. Tokens that an environment inserted have no version.
        """
        return min((int(versions.min()) for versions in self._sampled_versions()), default=self.start_version)

    @cached_property
    def newest_version(self) -> int:
        """The highest policy version that any generated token was sampled with; `start_version` without a token."""
        return max((int(versions.max()) for versions in self._sampled_versions()), default=self.start_version)

    def _sampled_versions(self) -> Iterator[Tensor]:
        for row in self.trajectories:
            versions = row.policy_versions[row.response_mask]
            if len(versions):
                yield versions


@dataclass(frozen=True)
class FailureCounts:
    """What went wrong with rollouts so far."""

    retries: int = 0
    """Attempts beyond the first, since the process started."""
    dropped_prompts: int = 0
    """Over the whole run, restarts included."""
    engine_restarts: int = 0
    """Generation servers that were started again, since the process started."""


NO_FAILURES = FailureCounts()


@dataclass(frozen=True)
class Chunk:
    """One Lightning batch: this rank's equal share of the prompt groups that are trained together."""

    ppo_step: int
    index: int
    """Number of the chunk within its PPO step, from 0."""
    rows: tuple[Trajectory, ...]
    """This rank's rows, in an order that depends on the selected groups only."""
    draws: tuple[int, ...]
    """Draws of all groups of the chunk, on every rank."""
    groups_dispatched: int
    """Groups of this PPO step handed out so far, this chunk included."""
    groups_per_step: int
    wait_s: float
    """Seconds the trainer waited for this chunk."""
    generation_s: tuple[float, ...]
    """Seconds from dispatch to commit of each group, in the order of `draws`."""
    failures: FailureCounts = NO_FAILURES
    """When the chunk was handed out."""

    @property
    def is_closing(self) -> bool:
        """Whether the PPO step closes on this chunk."""
        return self.groups_dispatched == self.groups_per_step


@dataclass(frozen=True)
class TrainRow:
    """One row of the current PPO step with what the advantage stage added; all `[T]`, on the CPU."""

    trajectory: Trajectory
    mask: Tensor
    """`[T]` bool, True where the token is trained (generated, and its row not masked out)."""
    values: Tensor
    """`[T]` float32, value of the state *before* each token under the unchanged critic (`old_values`)."""
    advantages: Tensor
    """`[T]` float32, not normalised; 0 where masked."""
    returns: Tensor
    """`[T]` float32, frozen critic targets; 0 where masked."""
    old_logprobs: Tensor | None = None
    """`[T]` float32, or None when the training forward itself is the old forward (ratio 1)."""
    ref_logprobs: Tensor | None = None
    """`[T]` float32 under the frozen reference policy, or None without a reference."""

    @cached_property
    def trained_tokens(self) -> int:
        """Tokens of this row that are trained."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class StepBatch:
    """All rows of one PPO step on this rank, as the critic epochs see them."""

    ppo_step: int
    rows: tuple[TrainRow, ...]
    num_chunks: int
    num_tokens: int
    """Trained tokens of the step over all ranks."""
    num_sequences: int
    """Rows with at least one trained token, over all ranks."""
