"""Defaults for optimizers, and a learning-rate schedule that counts PPO steps."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_ppo.errors import ConfigError
from lightning_ppo.validation import check_count, check_number, reject

_CANNOT_STEP: dict[type, str] = {
    LBFGS: "computes the loss again within a step, which accumulated gradients do not allow",
    ReduceLROnPlateau: "needs a metric at every tick, and a PPO step's are not known yet",
}


class LinearWarmupDecay(LambdaLR):
    """Rises linearly to the optimizer's learning rate, then falls linearly; one tick per PPO step.

    Args:
        optimizer: The optimizer.
        warmup_steps: PPO steps until the full rate; the first step already has 1/warmup_steps of it.
        total_steps: PPO steps until the final rate, which then stays.
        final_fraction: The final rate as a fraction of the full one, 0 to 1.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, total_steps: int = 100, final_fraction: float = 0.0
    ) -> None:
        check_count("warmup_steps", warmup_steps, 0)
        check_count("total_steps", total_steps)
        check_number("final_fraction", final_fraction, 0, 1)

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
            return rise * (1.0 - (1.0 - final_fraction) * min(1.0, step / total_steps))

        super().__init__(optimizer, factor)


def build(field: str, make: Callable[[Any], Any], argument: Any) -> Any:
    """Make an optimizer or a schedule.

    Raises:
        ConfigError: it refuses its settings, or cannot be stepped the way a PPO step does.
    """
    try:
        made = make(argument)
    except ConfigError as error:
        raise ConfigError(f"{field}.{error}") from error
    except (ValueError, TypeError, ZeroDivisionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise reject(
            field, getattr(make, "__name__", type(make).__name__), f"is refused ({reason})", "correct its settings"
        ) from error
    for kind, why in _CANNOT_STEP.items():
        if isinstance(made, kind):
            raise reject(field, kind.__name__, why, "set another one")
    return made


def default_learning_rate(parameters: int, *, tiny: float, large: float) -> float:
    """Rate that suits a model of some size: `tiny` up to a million parameters, falling inversely to `large`."""
    return min(tiny, max(large, tiny * 1e6 / max(parameters, 1)))


def default_policy_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW, betas (0.9, 0.99), no weight decay; 6e-4 for tiny policies, falling inversely with size to 1e-6."""
    return _default(parameters, tiny=6e-4, large=1e-6)


def default_critic_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW, betas (0.9, 0.99), no weight decay; 1e-3 for tiny critics, falling inversely with size to 1e-5."""
    return _default(parameters, tiny=1e-3, large=1e-5)


def _default(parameters: Iterable[nn.Parameter], *, tiny: float, large: float) -> AdamW:
    chosen = list(parameters)
    rate = default_learning_rate(sum(p.numel() for p in chosen), tiny=tiny, large=large)
    return AdamW(chosen, lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
