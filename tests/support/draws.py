"""Drawn prompts: which one a request is for, and the way of one to the end."""

from collections.abc import Iterable

from lightning_ppo.rollout.engine import GenerationRequest
from lightning_ppo.rollout.ledger import Ledger


def draw_of(request: GenerationRequest) -> int:
    """The draw that a training request belongs to."""
    return int(request.request_id.split("_")[0].removeprefix("draw"))


def train(ledger: Ledger, draws: Iterable[int]) -> None:
    """Generate, claim and train draws that were handed out, at once."""
    draws = list(draws)
    for draw in draws:
        ledger.dispatch(draw)
        ledger.finish(draw)
    ledger.claim(draws)
    ledger.train(draws)
