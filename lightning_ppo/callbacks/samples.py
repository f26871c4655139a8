"""SampleTable: what the policy writes, with its rewards, as a table in TensorBoard and in a file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_ppo.batch import Trajectory
from lightning_ppo.hooks import PPOCallback, PPOStepEnd
from lightning_ppo.validation import check_count

_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_MARKDOWN = re.compile(r"[\\`*_\[\]<>&|~]")


class SampleTable(PPOCallback):
    """Logs a table of sample responses: text `samples` in TensorBoard, and `samples.md` in the run's folder.

    The rows are spread evenly over the step's rewards, from the best to the worst of rank 0's responses.

    Args:
        every_n_steps: PPO steps between two tables; the first step has one too. 0 switches it off.
        rows: Responses per table.
        max_characters: Longer prompts and responses are cut in the middle.
    """

    def __init__(self, every_n_steps: int = 10, rows: int = 8, max_characters: int = 200) -> None:
        check_count("every_n_steps", every_n_steps, 0)
        check_count("rows", rows)
        check_count("max_characters", max_characters, 10)
        self.every_n_steps = every_n_steps
        self.rows = rows
        self.max_characters = max_characters

    @override
    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: Any, payload: PPOStepEnd) -> None:
        """Write the table if it is due."""
        step = payload.ppo_step
        if self.every_n_steps == 0 or not (step == 1 or step % self.every_n_steps == 0):
            return
        # asked on every rank, because Lightning agrees on the folder with a broadcast
        folder = trainer.log_dir if trainer.loggers else None
        if not trainer.is_global_zero:
            return
        chosen = spread([row.trajectory for row in payload.batch.rows], self.rows)
        table = self.table(chosen, pl_module.tokenizer)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # scalars of the first PPO step stand at 0
                logger.experiment.add_text("samples", table, step - 1)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / "samples.md").open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"## PPO step {step}\n\n{table}\n")

    def table(self, trajectories: Sequence[Trajectory], tokenizer: Any) -> str:
        """Build the markdown table.

        Args:
            trajectories: The rows.
            tokenizer: Decodes the prompts, special tokens included.
        """
        lines = ["| reward | tokens | end | prompt | response |", "|---:|---:|---|---|---|"]
        for row in trajectories:
            prompt = self._cell(tokenizer.decode(row.prompt_ids.tolist()))
            response = self._cell(row.response_text)
            lines.append(
                f"| {row.reward:.4g} | {len(row.response_ids)} | {row.finish_reason} | {prompt} | {response} |"
            )
        return "\n".join(lines) + "\n"

    def _cell(self, text: str) -> str:
        if len(text) > self.max_characters:
            half = self.max_characters // 2
            text = f"{text[:half]} … {text[-half:]}"
        return escape_markdown(text)


def spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Choose up to `count` trajectories, evenly spaced by reward, the best first; ties go by sample id."""
    ranked = sorted(trajectories, key=lambda row: (-row.reward, row.sample_id))
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(index * (len(ranked) - 1) / (count - 1))] for index in range(count)]


def escape_markdown(text: str) -> str:
    """Make a text show as it is in a cell of a markdown table; line breaks become ↵."""
    return _MARKDOWN.sub(lambda match: f"&#{ord(match.group())};", _LINE_BREAK.sub("↵", text))
