"""A module that never enters training mode."""

from typing import Self

from torch import nn
from typing_extensions import override


class EvalModeModule(nn.Module):
    """Stays in eval mode whatever Lightning asks for.

    Dropout in the training forward would make the PPO ratio differ from 1 before any update (verl issue 4708).
    """

    @override
    def train(self, mode: bool = True) -> Self:
        """Ignore `mode`: dropout stays off. Gradients are not affected."""
        return super().train(False)
