"""Checks that settings share. Every message reads `<field>=<value> <why it is wrong>; <what to set instead>`."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_ppo.errors import ConfigError


def reject(field: str, value: object, why: str, instead: str) -> ConfigError:
    """Build the one-line error every bad setting gets."""
    return ConfigError(f"{field}={value} {why}; {instead}")


def require(ok: bool, field: str, value: object, why: str, instead: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise reject(field, value, why, instead)


def check_kind(field: str, value: object, kind: type) -> None:
    """Raise `ConfigError` unless `value` is of the class `kind`."""
    why = f"is no {kind.__name__}"
    require(isinstance(value, kind), field, repr(value)[:60], why, f"pass {field}={kind.__name__}(...)")


def check_choice(field: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    require(value in allowed, field, value, "is unknown", f"choose one of {', '.join(allowed)}")


def check_choices(config: object, prefix: str = "") -> None:
    """Raise `ConfigError` unless every field that is annotated as a `Literal` has one of its values.

    Args:
        config: A dataclass.
        prefix: What comes before a field's name in messages.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            check_choice(prefix + name, getattr(config, name), get_args(kind))


def check_number(field: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise `ConfigError` unless `value` is a finite number in [low, high], or in (low, high] with `open_low`."""
    inside = isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high
    if open_low:
        inside = inside and value > low
    bounds = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if high < math.inf else "")
    require(inside, field, value, "is out of range", f"set a finite number {bounds}")


def is_count(value: Any, low: int = 1) -> bool:
    """Whether `value` is a whole number of at least `low`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_count(field: str, value: Any, low: int = 1) -> None:
    """Raise `ConfigError` unless `value` is a whole number of at least `low`."""
    require(is_count(value, low), field, repr(value), "is not a valid count", f"set a whole number >= {low}")


def check_list(field: str, value: object, kind: type) -> None:
    """Raise `ConfigError` unless `value` is a list or tuple of `kind`; a text would do as a sequence of its letters."""
    ok = isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)
    require(ok, field, repr(value)[:60], f"is no list of {kind.__name__}", "set a list or tuple, with [] around one")
