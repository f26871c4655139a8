"""What the policy's and the critic's split updates share."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_ppo.accumulator import GradientAccumulator, clip_to_norm
from lightning_ppo.batch import TrainRow
from lightning_ppo.config import PPOConfig
from lightning_ppo.errors import StepError
from lightning_ppo.models.micro_batch import MicroBatch, collate, plan_micro_batches
from lightning_ppo.ranks import Ranks
from lightning_ppo.residency import Residency

_NAMED = 4
"""Samples that an error names."""


class SumMetrics:
    """Sums and maxima over micro-batches, in float64, reduced over ranks once at the close."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self._maxima: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def add(self, **values: Tensor) -> None:
        """Add detached scalars; they stay on their device until `reduced`."""
        for name, value in values.items():
            self._sums[name] = self._sums[name].to(value.device) + value.detach().double()

    def maximum(self, **values: Tensor) -> None:
        """Take in detached scalars >= 0 of which the largest counts; NaN stays NaN."""
        for name, value in values.items():
            self._maxima[name] = torch.maximum(self._maxima[name].to(value.device), value.detach().double())

    def reduced(self, ranks: Ranks) -> "defaultdict[str, float]":
        """Sum over ranks; unknown names are 0. A collective: ranks without rows take part."""
        totals = torch.stack([self._sums[name].cpu() for name in METRICS])
        ranks.sum_(totals)
        return defaultdict(float, zip(METRICS, totals.tolist(), strict=True))

    def largest(self, ranks: Ranks, *names: str) -> list[float]:
        """Return maxima over ranks, 0 for what nobody took in. A collective: ranks without rows take part."""
        return ranks.stack(torch.stack([self._maxima[name].cpu() for name in names])).amax(0).tolist()


METRICS = (
    "tokens",
    "sequences",
    "loss_main",
    "loss_unit",
    "loss_regularizer",
    "approx_kl",
    "clipped",
    "ratio",
    "logprobs",
    "kl",
    "mismatch_kl",
    "mult_prob_error",
    "weights",
    "raw_weights",
    "out_of_bounds",
    "zeroed",
)
"""Fixed, so that every rank reduces the same vector even if it had no rows."""


def trainable_micro_batches(
    rows: Sequence[TrainRow], config: PPOConfig, device: torch.device
) -> Iterator[tuple[MicroBatch, list[TrainRow]]]:
    """Yield micro-batches of the rows that have a trained token, one at a time.

    Only one micro-batch exists at once: neither padded tensors nor graphs of the whole step are kept.
    """
    chosen = [row for row in rows if row.trained_tokens]
    trajectories = [row.trajectory for row in chosen]
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    for indices in plan_micro_batches(lengths, config.micro_batch_tokens, config.micro_batch_overhead_tokens):
        yield collate(trajectories, indices, device), [chosen[i] for i in indices]


Losses = list[tuple[Tensor, tuple[str, ...]]]
"""The loss of each micro-batch with the ids of its samples."""


class SplitUpdate(ABC):
    """begin, train_chunk as often as chunks arrive, finish (one optimizer step), abort.

    Args:
        name: `policy` or `critic`, for errors.
        accumulator: Buffers for the model's gradients.
        config: Losses and clipping.
        ranks: Counts and metrics are summed over these.
        residency: Tells the device.
        backward: Runs a backward pass (Lightning's `manual_backward`).
        optimizer_step: Makes one optimizer step from the parameters' `.grad`.
    """

    def __init__(
        self,
        name: str,
        accumulator: GradientAccumulator,
        config: PPOConfig,
        ranks: Ranks,
        residency: Residency,
        backward: Callable[..., None],
        optimizer_step: Callable[[], None],
    ) -> None:
        self.name = name
        self.accumulator = accumulator
        self.config = config
        self._ranks = ranks
        self._residency = residency
        self._backward = backward
        self._optimizer_step = optimizer_step
        self._sums = SumMetrics()

    def begin(self) -> None:
        """Open an update with empty gradients.

        Raises:
            UpdateInProgressError: one is open already.
        """
        self.accumulator.begin()
        self._sums = SumMetrics()

    def abort(self) -> None:
        """Drop what was accumulated; safe at any time."""
        self.accumulator.abort()

    @torch.no_grad()
    def check_scores(self, rows: Sequence[TrainRow], where: str) -> None:
        """Fail on every rank if the model has diverged: what it gives to a row of one of them is not finite.

        A finite gradient times too high a rate makes finite weights whose products are not. Found here, they reach
        neither the generators nor a checkpoint. A collective: ranks without rows take part.

        Args:
            rows: This rank's rows; the shortest is tried.
            where: Names the update in errors.

        Raises:
            StepError: it has diverged.
        """
        fault = None
        if rows:
            shortest = min((row.trajectory for row in rows), key=lambda trajectory: trajectory.num_tokens)
            scores = self._score(collate([shortest], [0], self._residency.device))
            if not bool(torch.isfinite(scores).all()):
                fault = (
                    f"the {self.name} has diverged: what it gives to sample {shortest.sample_id} is not finite after "
                    f"{where}; lower the learning rate of model.{self.name}_optimizer"
                )
        self._fail_together(fault, f"the {self.name} has diverged on another rank after {where}; see its error")

    @abstractmethod
    def _score(self, batch: MicroBatch) -> Tensor:
        """What the model gives to each response token, `[b, T]`."""

    def _check(self, losses: Losses, rows: Sequence[TrainRow], where: str) -> None:
        """Fail on every rank if a loss or the gradient is not finite on one of them, so that none waits for it."""
        self._fail_together(
            self._fault(losses, rows, where),
            f"{self.name} loss or gradient is not finite in {where} on another rank; see its error",
        )

    def _fail_together(self, fault: str | None, fault_elsewhere: str) -> None:
        ranks_at_fault = torch.tensor(float(fault is not None), dtype=torch.float64)
        self._ranks.sum_(ranks_at_fault)
        if ranks_at_fault > 0:
            raise StepError(fault or fault_elsewhere)

    def _fault(self, losses: Losses, rows: Sequence[TrainRow], where: str) -> str | None:
        if losses and not bool(torch.isfinite(torch.stack([loss for loss, _ in losses])).all()):
            loss, ids = next((value, ids) for value, ids in losses if not bool(torch.isfinite(value)))
            return f"{self.name} loss is {float(loss)} in {where}, {_few(ids)}"
        if not self.accumulator.is_finite():
            ids = tuple(row.trajectory.sample_id for row in rows)
            return (
                f"{self.name} gradient is not finite after {where}, {_few(ids)}; look at their rewards, or lower the "
                f"learning rate of model.{self.name}_optimizer"
            )
        return None

    def _step(self, coefficients: dict[str, float], count: float, max_norm: float | None) -> float:
        flat = self.accumulator.close({name: factor / count for name, factor in coefficients.items()})
        norm = clip_to_norm(flat, max_norm)
        if not norm < float("inf"):
            raise StepError(f"{self.name} gradient norm is {norm} after the sum over ranks")
        with self.accumulator.as_grads(flat):
            self._optimizer_step()
        return norm


def _few(sample_ids: Sequence[str]) -> str:
    """Name some samples, so that the error stays one line that can be read."""
    shown = ", ".join(sample_ids[:_NAMED])
    return f"samples {shown}" + (f" and {len(sample_ids) - _NAMED} more" if len(sample_ids) > _NAMED else "")
