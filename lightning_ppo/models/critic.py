"""The critic: one value per state, from a token classification model with one label.

Shapes: `b` rows, `T` response tokens.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_ppo.models.frozen_mode import EvalModeModule
from lightning_ppo.models.micro_batch import MicroBatch


class CriticModel(EvalModeModule):
    """A language model's backbone with a linear value head.

    Args:
        model: A Hugging Face token classification model with one label; its logit at a position is the value of the
            state after the token there.
    """

    completed_steps: Tensor
    """PPO steps that this model went through, scalar int64; travels with its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("completed_steps", torch.zeros((), dtype=torch.long))
        self.train(False)

    @override
    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Compute the value of the state before each generated token, and of the state after the response.

        Args:
            batch: Rows on this model's device.

        Returns:
            `[b, T]` float32 values, 0 where `batch.mask` is False, and `[b]` float32 final values.
        """
        outputs = self.model(input_ids=batch.input_ids, use_cache=False).logits.squeeze(-1)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        values = outputs.gather(1, batch.state_index)
        values = torch.where(batch.mask, values, torch.zeros_like(values))
        return values, outputs.gather(1, batch.final_index[:, None]).squeeze(1)
