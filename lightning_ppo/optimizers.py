"""The optimizers of policy and critic with their learning-rate schedules: built, named, and checked on a resume."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_ppo.errors import CheckpointError, ConfigError
from lightning_ppo.validation import reject

_CANNOT_STEP: dict[type, str] = {
    LBFGS: "computes the loss again within a step, which accumulated gradients do not allow",
    ReduceLROnPlateau: "needs a metric at every tick, and a PPO step's are not known yet",
}


@dataclass(frozen=True)
class Makers:
    """What builds the optimizer of a model, and its schedule if it has one."""

    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any] | None = None


class Optimizers:
    """Optimizers and schedules by the name of their model.

    Args:
        makers: What builds them, in the order in which Lightning stores them.
    """

    def __init__(self, makers: Mapping[str, Makers]) -> None:
        self._makers = makers
        self._optimizers: dict[str, Optimizer] = {}
        self._schedulers: dict[str, LRScheduler] = {}
        self._saved_kinds: Mapping[str, str] = {}

    def build(self, models: Mapping[str, nn.Module]) -> tuple[list[Optimizer], list[dict[str, Any]]]:
        """Build everything anew.

        Returns:
            What `LightningModule.configure_optimizers` returns.

        Raises:
            ConfigError: an optimizer or a schedule refuses its settings, or cannot be stepped the way a PPO step does.
            CheckpointError: an optimizer is of another kind than the one whose state will be restored.
        """
        schedules: list[dict[str, Any]] = []
        for name, makers in self._makers.items():
            optimizer = build(f"{name}_optimizer", makers.optimizer, models[name].parameters())
            self._check_kind(name, optimizer)
            self._optimizers[name] = optimizer
            if makers.scheduler is not None:
                self._schedulers[name] = build(f"{name}_scheduler", makers.scheduler, optimizer)
                schedules.append({"scheduler": self._schedulers[name], "name": f"{name}/lr"})
        return list(self._optimizers.values()), schedules

    def get(self, name: str) -> Optimizer:
        """Return a model's optimizer.

        Raises:
            ConfigError: nothing was built: a subclass has a `configure_optimizers` of its own.
        """
        if name not in self._optimizers:
            raise reject(
                "configure_optimizers",
                "your own",
                f"leaves the {name} without an optimizer",
                f"pass {name}_optimizer to PPOModule instead",
            )
        return self._optimizers[name]

    def step_scheduler(self, name: str) -> None:
        """Tick a model's schedule, if it has one."""
        if name in self._schedulers:
            self._schedulers[name].step()

    def learning_rates(self) -> dict[str, float]:
        """Return the current learning rates by metric name."""
        return {f"{name}/lr": optimizer.param_groups[0]["lr"] for name, optimizer in self._optimizers.items()}

    def kinds(self) -> dict[str, str]:
        """Return the class of each optimizer, for a checkpoint."""
        return {name: type(optimizer).__qualname__ for name, optimizer in self._optimizers.items()}

    def expect(self, kinds: Mapping[str, str]) -> None:
        """Have `build` insist on the classes that a checkpoint names: each reads the state of its own kind only."""
        self._saved_kinds = kinds

    def _check_kind(self, name: str, optimizer: Optimizer) -> None:
        kind = type(optimizer).__qualname__
        saved = self._saved_kinds.get(name, kind)
        if kind != saved:
            raise CheckpointError(
                f"{name}_optimizer={kind} cannot go on with the state of {saved} that the checkpoint holds;"
                f" set {saved}, or export the checkpoint and start a new run from its folders"
            )


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
