"""Groups that no PPO step may train any more are generated again; nothing is thrown away."""

from lightning_ppo.rollout.pump import Pump
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.sampler_protocol import Sampler
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.windows import VersionWindow


def refresh(
    buffer: ReplayBuffer, stream: PromptStream, pump: Pump, sampler: Sampler, window: VersionWindow, ppo_step: int
) -> bool:
    """Have ready groups generated again that are too old, or that the sampler would never select.

    A group keeps its slot and its step. Only one whose step is over is given back: its prompt is drawn anew.

    Args:
        buffer: Holds the groups; its lock is held by the caller.
        stream: Told what becomes of each draw.
        pump: Generates again; to be woken up afterwards.
        sampler: Whose window counts besides.
        window: How old a rollout may be.
        ppo_step: The step that trains next.

    Returns:
        Whether there were any.
    """
    outdated = {group.draw: group for group in buffer.stale(window.oldest_allowed(pump.version))}
    outdated |= {group.draw: group for group in sampler.evict(buffer, pump.version, ppo_step)}
    for draw, group in sorted(outdated.items()):
        if group.target_step is not None and group.target_step < ppo_step:
            buffer.give_back([draw])
            stream.give_back(draw)
        else:
            slot = buffer.regenerate(draw, pump.version)
            stream.ledger.regenerate(draw)
            pump.dispatch_again(slot, {})
    return bool(outdated)
