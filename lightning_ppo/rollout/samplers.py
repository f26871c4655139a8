"""The sampler of a run, by its name."""

from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.custom_sampler import load_sampler
from lightning_ppo.rollout.gated_samplers import InOrderSampler, ReadyFirstSampler, WeightFifoSampler
from lightning_ppo.rollout.sampler_protocol import Admission, Sampler, SamplerCapabilities
from lightning_ppo.rollout.window_sampler import WindowedSampler
from lightning_ppo.rollout.windows import VersionWindow

__all__ = [
    "Admission",
    "InOrderSampler",
    "ReadyFirstSampler",
    "Sampler",
    "SamplerCapabilities",
    "WeightFifoSampler",
    "WindowedSampler",
    "make_sampler",
]


def make_sampler(config: RolloutConfig, warmup_steps: int = 0) -> Sampler:
    """Build the sampler that `config.sampler` names.

    Args:
        config: Name, options, sizes and window.
        warmup_steps: `critic_warmup_steps` of the PPO step.

    Raises:
        ConfigError: a warm-up lead without warm-up, or a sampler of the user's own that cannot be used, see
            `load_sampler`.
    """
    window = VersionWindow.of(config, warmup_steps)
    size = config.num_prompts_per_step
    if config.sampler == "windowed":
        return WindowedSampler(size, window, config.sample_freshest_first)
    gated: dict[str, type[InOrderSampler | ReadyFirstSampler | WeightFifoSampler]]
    gated = {"in_order": InOrderSampler, "ready_first": ReadyFirstSampler, "weight_fifo": WeightFifoSampler}
    kind = gated.get(config.sampler)
    return load_sampler(config, window) if kind is None else kind(size, window)
