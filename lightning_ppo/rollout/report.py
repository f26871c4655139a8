"""What validation and prediction tell about sampled responses."""

from collections.abc import Sequence
from typing import Any

from lightning_ppo.batch import Prompt, Trajectory


def summary(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over responses: reward, response tokens, and the share that hit the token limit."""
    return {
        "reward_mean": sum(row.reward for row in rows) / len(rows),
        "response_length": sum(len(row.response_ids) for row in rows) / len(rows),
        "truncated_fraction": sum(row.truncated for row in rows) / len(rows),
    }


def records(prompts: Sequence[Prompt], rows: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Return one plain dict per response, ready for JSON, with the prompt's other columns.

    Args:
        prompts: What was asked.
        rows: One response for each.
    """
    return [
        {
            **prompt.columns,
            "prompt": prompt.text,
            "response": row.response_text,
            "reward": row.reward,
            "finish_reason": row.finish_reason,
            "response_ids": row.response_ids.tolist(),
            "logprobs": row.rollout_logprobs.tolist(),
        }
        for prompt, row in zip(prompts, rows, strict=True)
    ]
