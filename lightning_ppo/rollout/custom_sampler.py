"""A user's own sampler: imported, built, and checked before anything starts."""

import inspect
from typing import cast

from lightning_ppo.imports import import_object
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.sampler_protocol import Sampler, SamplerCapabilities
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.validation import reject

METHODS = ("required_capacity", "seed_dispatch", "admit", "select", "evict", "aborts_inflight")
MEMBERS = ("capabilities", "is_on_policy", *METHODS)


def load_sampler(config: RolloutConfig, window: VersionWindow) -> Sampler:
    """Build the sampler that `config.sampler` names by import path.

    The class is called as `Class(num_prompts_per_step, window, **sampler_options)`.

    Raises:
        ConfigError: the path cannot be imported or names no class; the class does not declare `capabilities` itself;
            its constructor raises (chained); or a member of `Sampler` is missing, asynchronous, or cannot be called as
            `Sampler` says.
    """
    path = config.sampler
    found = import_object("sampler", path)
    if not isinstance(found, type):
        raise reject("sampler", path, f"is no class but {type(found).__name__}", "name a class")
    if not isinstance(vars(found).get("capabilities"), SamplerCapabilities):
        why = "does not declare what it is capable of (inheriting it does not count)"
        raise reject("sampler", path, why, "set capabilities = SamplerCapabilities(...) in the class itself")
    try:
        sampler = found(config.num_prompts_per_step, window, **config.sampler_options)
    except Exception as error:
        why = f"cannot be built ({type(error).__name__}: {' '.join(str(error).split())})"
        instead = f"let it take (num_prompts_per_step, window) and sampler_options={config.sampler_options}"
        raise reject("sampler", path, why, instead) from error
    _check_members(path, sampler)
    return cast(Sampler, sampler)


def _check_members(path: str, sampler: object) -> None:
    for name in MEMBERS:
        # Who derives from the protocol inherits its empty methods.
        if not hasattr(sampler, name) or getattr(type(sampler), name, None) is getattr(Sampler, name, sampler):
            raise reject("sampler", path, f"has no {name}", "give it everything that Sampler has")
    for name in METHODS:
        method = getattr(sampler, name)
        _, *wanted = inspect.signature(getattr(Sampler, name)).parameters
        try:
            inspect.signature(method).bind(*wanted)
        except (TypeError, ValueError) as error:
            why = f"has {name}, but not as {name}({', '.join(wanted)})"
            raise reject("sampler", path, why, "give it the parameters that Sampler has") from error
        if inspect.iscoroutinefunction(method):
            raise reject("sampler", path, f"has an asynchronous {name}", "write a plain method that does not block")
