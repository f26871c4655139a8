"""What operations on a large buffer cost, in comparisons: timings would depend on the machine."""

import pytest

from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import InOrderSampler, ReadyFirstSampler, WeightFifoSampler, WindowedSampler
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import make_prompt, make_trajectory

KINDS = [InOrderSampler, ReadyFirstSampler, WeightFifoSampler, WindowedSampler]


class Counted(int):
    """A whole number that counts its comparisons."""

    seen = 0

    def _counting(name: str):
        def compare(self, other: int) -> bool:
            Counted.seen += 1
            return getattr(int, name)(self, other)

        return compare

    __lt__, __le__, __gt__ = _counting("__lt__"), _counting("__le__"), _counting("__gt__")
    __ge__, __eq__ = _counting("__ge__"), _counting("__eq__")
    __hash__ = int.__hash__


def comparisons(kind: type, groups: int) -> dict[str, int]:
    """Comparisons that each operation takes with this many buffered groups, a tenth of them being generated."""
    sampler = kind(4, VersionWindow(2, 2))
    stamped = sampler.capabilities.stamps_targets
    buffer = ReplayBuffer(capacity=groups + 1, group_size=1)
    rows = {version: [make_trajectory(version=version)] for version in (1, 5, 6)}
    for draw in map(Counted, range(groups)):
        # the first eight are too old, and their step is over
        version = 1 if draw < 8 else 5 + draw % 2
        slot = buffer.reserve(draw, make_prompt(), Counted(version), Counted(draw // 4) if stamped else None)
        if draw % 10:
            buffer.commit(slot.group_id, rows[version], version)
    chosen: list = []
    operations = {
        "admit": lambda: sampler.admit(6),
        "reserve": lambda: buffer.reserve(Counted(groups), make_prompt(), Counted(6), None),
        "commit": lambda: buffer.commit(f"draw{groups}", rows[6], 6),
        "select": lambda: chosen.extend(sampler.select(buffer, 6, 12, 3)),
        "evict": lambda: sampler.evict(buffer, 6, 2),
        "stale": lambda: buffer.stale(4),
        "regenerate": lambda: buffer.regenerate(Counted(groups - 1), Counted(6)),
        "claim": lambda: buffer.claim(chosen),
        "release": lambda: buffer.release([group.draw for group in chosen]),
        "give_back": lambda: buffer.give_back([Counted(101)]),
    }
    counts = {}
    for name, operation in operations.items():
        Counted.seen = 0
        operation()
        counts[name] = Counted.seen
    assert len(chosen) == 3
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_walks_through_the_buffer(kind: type) -> None:
    few, many = comparisons(kind, 120), comparisons(kind, 12_000)
    assert sum(few.values()) > 50
    for name, count in many.items():
        # a hundred times as many groups: a factor of log(12 000) / log(120) = 2
        assert count <= 3 * few[name] + 10, name
