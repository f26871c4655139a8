"""How many finished groups a streaming step takes now: a chunk that leaves a short tail behind is deferred.

Source: the tail rule and the alignment rule of `behaviour.md` section 1.6 (NeMo-RL streaming PPO guide), own words.
"""

import math
from collections.abc import Sequence

from lightning_ppo.validation import require


def group_alignment(*, generations: int, dp_sizes: Sequence[int], micro_batch_rows: Sequence[int] = ()) -> int:
    """Smallest number of groups whose rows divide evenly over all ranks (and static micro-batches) of both models.

    `m` is the least common multiple of every data-parallel size and of every static micro-batch over all ranks. The
    rows of `align = m / gcd(m, generations)` groups, and of no fewer, are a multiple of `m`.

    Args:
        generations: G, rows per group.
        dp_sizes: Data-parallel size of each model (policy, critic).
        micro_batch_rows: Rows of one static micro-batch over *all* ranks (data-parallel size times rows per rank), one
            for every kind of pass that uses static micro-batches; empty with packing or a token budget.

    Returns:
        Every chunk must hold a multiple of this many groups.

    Source: behaviour.md 1.6, "Alignment".
    """
    multiple = math.lcm(*dp_sizes, *micro_batch_rows)
    return multiple // math.gcd(multiple, generations)


def check_alignment(num_prompts_per_step: int, align: int) -> None:
    """Check that a PPO step can be cut into aligned chunks.

    Raises:
        ConfigError: `num_prompts_per_step` is no multiple of `align`; padding rows or duplicates are never made.
    """
    require(
        num_prompts_per_step % align == 0,
        "num_prompts_per_step",
        num_prompts_per_step,
        f"does not divide into chunks of {align} groups, the fewest that all ranks and micro-batches share equally",
        f"set a multiple of {align}",
    )


def tail_floor(min_groups: int) -> int:
    """Fewest groups that a non-final chunk may leave behind: ceil(min_groups / 2).

    Args:
        min_groups: The configured `min_groups_for_streaming_train`, not the smaller minimum of a final remainder.
    """
    return -(-min_groups // 2)


def choose(ready: int, remaining: int, *, min_groups: int, align: int, streaming: bool) -> int:
    """Decide how many of the ready groups to train now.

    The count is aligned first; the minimum and the tail are tested on the aligned count. A selection that would strand
    a short tail is deferred as a whole, never trimmed.

    Args:
        ready: Finished groups that this step may train.
        remaining: Groups of this step that are not consumed yet.
        min_groups: The configured `min_groups_for_streaming_train`.
        align: Every chunk is a multiple of this.
        streaming: Whether the tail rule applies.

    Returns:
        Groups to take, in sampler order; 0 means wait, and changes nothing.

    Source: behaviour.md 1.6, `choose`.
    """
    take = min(ready, remaining)
    take -= take % align
    if take < min(min_groups, remaining):
        return 0
    if streaming and 0 < remaining - take < tail_floor(min_groups):
        return 0
    return take
