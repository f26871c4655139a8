"""The way of a drawn prompt to the end."""

from collections.abc import Iterable

from lightning_ppo.rollout.ledger import Ledger


def train(ledger: Ledger, draws: Iterable[int]) -> None:
    """Generate, claim and train draws that were handed out, at once."""
    draws = list(draws)
    for draw in draws:
        ledger.dispatch(draw)
        ledger.finish(draw)
    ledger.claim(draws)
    ledger.train(draws)
