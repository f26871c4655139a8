"""Dealing a chunk out to data-parallel ranks."""

from dataclasses import dataclass

from lightning_ppo.batch import FailureCounts, Trajectory
from lightning_ppo.rollout.claims import Claim


@dataclass(frozen=True)
class Share:
    """One rank's part of a chunk."""

    rows: tuple[Trajectory, ...]
    draws: tuple[int, ...]
    """Draws of all groups of the chunk."""
    generation_s: tuple[float, ...]
    """Seconds from dispatch to commit of each group."""
    groups_in_step: int
    """Groups that the PPO step has in all."""
    failures: FailureCounts


def deal(claim: Claim, ranks: int) -> list[Share]:
    """Give every rank the same number of rows of similar lengths; no row twice, none left over.

    Args:
        claim: The chunk's groups; `ranks` divides their rows (see `group_alignment`).
        ranks: Data-parallel ranks.
    """
    rows = [row for group in claim.groups for row in group.trajectories]
    if len(rows) % ranks:
        raise ValueError(f"{len(rows)} rows cannot be dealt equally to {ranks} ranks")
    if ranks > 1:
        rows.sort(key=lambda row: (row.num_tokens, row.sample_id))
    draws = tuple(group.draw for group in claim.groups)
    seconds = tuple(group.generation_s for group in claim.groups)
    return [
        Share(tuple(rows[rank::ranks]), draws, seconds, claim.groups_in_step, claim.failures) for rank in range(ranks)
    ]
