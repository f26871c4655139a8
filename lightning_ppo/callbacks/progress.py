"""PPOProgressBar: PPO step, chunks, reward, and where the time goes; a line now and then where there is no terminal."""

import math
import sys
import time
from collections import deque
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from tqdm import tqdm
from typing_extensions import override

from lightning_ppo.hooks import ChunkReady, PPOStepEnd
from lightning_ppo.validation import check_count

PHASES = ("wait", "value", "policy", "critic", "refit")
"""Phases of `time/<phase>_s` that are shown, in the order in which they happen."""

REDRAW_S = 0.1
"""Least time between two redraws for the sake of a chunk."""


class PPOProgressBar(ProgressBar):
    """Shows PPO steps instead of batches.

    On a terminal: one line with the step, the current chunk k, groups d/P handed out, reward, and the share of time of
    each phase. Elsewhere (a file, a pipe): a plain line every `every_n_steps` steps, every 10 times as many from the
    100th line on, and so forth, so that long runs do not flood a log.

    Args:
        every_n_steps: PPO steps between two lines without a terminal, and those that the mean reward and the shares of
            time are taken over.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__()
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._enabled = True
        self._bar: tqdm | None = None
        self._recent: deque[dict[str, float]] = deque(maxlen=every_n_steps)
        self._validation_reward: float | None = None
        self._where = ""
        self._printed_step = 0
        self._redrawn_s = 0.0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        tqdm.write(sep.join(map(str, args)), file=sys.stdout, **kwargs)

    # ------------------------------------------------------------------ Lightning's hooks

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._printed_step = trainer.global_step
        if self._enabled and sys.stdout.isatty():
            total = _total(trainer)
            head = "{desc} {n_fmt}" if total is None else "{desc} {n_fmt}/{total_fmt} {bar:10} {elapsed}<{remaining}"
            self._bar = tqdm(
                desc="PPO step",
                total=total,
                initial=trainer.global_step,
                file=sys.stdout,
                dynamic_ncols=True,
                bar_format=head + "{postfix}",
            )

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reward = trainer.callback_metrics.get("val/reward_mean")
        if reward is not None and not trainer.sanity_checking:
            self._validation_reward = float(reward)
            self._redraw()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled and self._bar is None and trainer.global_step > self._printed_step and self._recent:
            self._print_line(trainer, trainer.global_step)
        self._close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    # ------------------------------------------------------------------ hooks of the PPO step

    def on_chunk_ready(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: ChunkReady) -> None:
        """Show the chunk that is trained now."""
        chunk = payload.chunk
        self._where = f"chunk {chunk.index}, groups {chunk.groups_dispatched}/{chunk.groups_per_step}"
        if time.monotonic() - self._redrawn_s >= REDRAW_S:
            self._redraw()

    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: PPOStepEnd) -> None:
        """Advance by one PPO step."""
        self._recent.append(payload.metrics)
        if self._bar is not None:
            self._bar.n = payload.ppo_step
            self._redraw()
        elif self._enabled and (payload.ppo_step == 1 or self._is_due(payload.ppo_step)):
            self._print_line(trainer, payload.ppo_step)

    # ------------------------------------------------------------------

    def _is_due(self, step: int) -> bool:
        decade = max(0, math.floor(math.log10(max(step / self.every_n_steps, 1))) - 1)
        return step % (self.every_n_steps * 10**decade) == 0

    def _redraw(self) -> None:
        if self._bar is None:
            return
        self._redrawn_s = time.monotonic()
        parts = [part for part in (self._where, self._rewards(), self._shares(" ")) if part]
        self._bar.set_postfix_str(", ".join(parts))

    def _print_line(self, trainer: L.Trainer, step: int) -> None:
        total = _total(trainer)
        of = "" if total is None else f"/{total}"
        seconds = self._sum("time/step_s") / len(self._recent)
        chunks = self._sum("step/chunks") / len(self._recent)
        line = f"PPO step {step}{of}: {self._rewards()}, {chunks:.1f} chunks and {seconds:.2f} s per step"
        print(f"{line} ({self._shares(', ')})", flush=True)
        self._printed_step = step

    def _rewards(self) -> str:
        if not self._recent:
            return ""
        name = "rollout/reward_mean"
        text = f"reward {self._recent[-1][name]:.3f} (mean of {len(self._recent)}: "
        text += f"{self._sum(name) / len(self._recent):.3f})"
        return text if self._validation_reward is None else f"{text}, val {self._validation_reward:.3f}"

    def _shares(self, separator: str) -> str:
        whole = self._sum("time/step_s")
        if whole <= 0:
            return ""
        return separator.join(f"{phase} {self._sum(f'time/{phase}_s') / whole:.0%}" for phase in PHASES)

    def _sum(self, name: str) -> float:
        return sum(metrics.get(name, 0.0) for metrics in self._recent)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def use_ppo_progress_bar(trainer: L.Trainer) -> None:
    """Put a `PPOProgressBar` in the place of the bar that Lightning adds by itself.

    A bar that the user passed stays: a subclass, or one with other settings than the default ones. So does no bar.

    Args:
        trainer: A trainer whose callbacks are not set up yet.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for index, callback in enumerate(callbacks):
        if type(callback) in (RichProgressBar, TQDMProgressBar) and _settings(callback) == _settings(type(callback)()):
            callbacks[index] = PPOProgressBar()


def _settings(bar: ProgressBar) -> list[object]:
    names = ("_refresh_rate", "_process_position", "_leave", "theme", "_console_kwargs", "_enabled")
    return [getattr(bar, name, None) for name in names]


def _total(trainer: L.Trainer) -> int | None:
    limit = trainer.max_epochs
    return None if limit is None or limit == -1 else limit
