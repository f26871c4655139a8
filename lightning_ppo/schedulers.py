"""A learning-rate schedule that counts PPO steps."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_ppo.validation import check_count, check_number, require


class LinearWarmupDecay(LambdaLR):
    """Rises linearly to the optimizer's learning rate, then falls linearly; one tick per PPO step.

    Args:
        optimizer: The optimizer.
        warmup_steps: PPO steps until the full rate, which step `warmup_steps` has; the first one has 1/warmup_steps.
        total_steps: PPO steps until the final rate, which then stays.
        final_fraction: The final rate as a fraction of the full one, 0 to 1.

    Raises:
        ConfigError: a number is out of range, or `warmup_steps` is above `total_steps`.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, total_steps: int = 100, final_fraction: float = 0.0
    ) -> None:
        check_count("warmup_steps", warmup_steps, 0)
        check_count("total_steps", total_steps)
        why = f"is above total_steps={total_steps}"
        require(warmup_steps <= total_steps, "warmup_steps", warmup_steps, why, f"set at most {total_steps}")
        check_number("final_fraction", final_fraction, 0, 1)

        peak = max(warmup_steps - 1, 0)

        def factor(step: int) -> float:
            if step < peak:
                return (step + 1) / warmup_steps
            return 1.0 - (1.0 - final_fraction) * min(1.0, (step - peak) / (total_steps - peak))

        super().__init__(optimizer, factor)
