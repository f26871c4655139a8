"""How the samplers scale: time of every operation with 1,000 and with 100,000 buffered groups, and the ratio.

`python benchmarks/sampler_scale.py --groups 1000 100000 --repeats 30`

The buffer holds groups of three start versions and, with `in_order`, of as many target steps as there are batches; a
tenth of them are being generated. What an operation returns has the same size in both buffers: 16 selected groups, 8
evicted ones, 8 stale ones, one group reserved, committed, generated again, claimed and released. Each repeat measures a
batch of calls in processor time, the median over repeats counts. The garbage collector is off while it measures, as in
`timeit`: its passes over 100,000 groups would be booked on whatever runs when one falls due.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import Sampler, make_sampler
from lightning_ppo.testing import make_prompt, make_trajectory

P, LIMIT, OLD = 32, 16, 8
VERSION = 6
CALLS = 20
"""Calls of one operation per repeat."""
SAMPLERS = {
    "in_order": {},
    "ready_first": {},
    "windowed": {},
    "windowed, freshest first": {"sample_freshest_first": True},
    "weight_fifo": {},
}


class Bench:
    """One sampler with one filled buffer."""

    def __init__(self, name: str, groups: int) -> None:
        sampler, *_ = name.split(",")
        config = RolloutConfig(
            num_prompts_per_step=P, sampler=sampler, max_lookahead_versions=1, **SAMPLERS[name], seed=0
        )
        self.sampler: Sampler = make_sampler(config)
        self.stamped = self.sampler.capabilities.stamps_targets
        self.buffer = ReplayBuffer(groups + CALLS, 1)
        self.prompt: Prompt = make_prompt()
        self.rows: dict[int, list[Trajectory]] = {v: [make_trajectory(version=v)] for v in (1, VERSION - 1, VERSION)}
        self.groups = groups
        for draw in range(groups):
            # The first ones are too old for every window, and their step is over.
            self._reserve(draw, 1 if draw < OLD else VERSION - draw % 2)
            if draw % 10:
                self._commit(draw)
        for draw in range(0, OLD, 10):
            self._commit(draw)
        step = OLD // P + 1
        self.step = step if self.stamped else VERSION
        chosen = self.sampler.select(self.buffer, VERSION, self.step, LIMIT)
        assert len(chosen) == LIMIT, (name, len(chosen))

    def _reserve(self, draw: int, version: int) -> None:
        # Step 0 is that of the old groups alone.
        target = (0 if draw < OLD else 1 + (draw - OLD) // P) if self.stamped else None
        self.buffer.reserve(draw, self.prompt, version, target)
        self.last = version

    def _commit(self, draw: int) -> None:
        self.buffer.commit(f"draw{draw}", self.rows[self.last if draw >= OLD else 1], VERSION)

    def measure(self, repeats: int) -> dict[str, float]:
        """Return microseconds per call of every operation."""
        new = range(self.groups, self.groups + CALLS)
        ready = [group.draw for group in self.buffer.ready()]
        middle = ready[len(ready) // 2 : len(ready) // 2 + CALLS]
        buffer, sampler, rows = self.buffer, self.sampler, self.rows[VERSION]
        found: dict[str, list[float]] = {}

        def timed(name: str, call: Callable[[int], object], over: range | list[int]) -> None:
            begin = time.process_time_ns()
            for draw in over:
                call(draw)
            found.setdefault(name, []).append((time.process_time_ns() - begin) / len(over) / 1e3)

        gc.collect()
        gc.disable()
        for _ in range(repeats):
            timed("admit", lambda draw: sampler.admit(VERSION + draw // P), new)
            timed("select", lambda draw: sampler.select(buffer, VERSION, self.step, LIMIT), new)
            timed("evict", lambda draw: sampler.evict(buffer, VERSION, 1), new)
            timed("stale", lambda draw: buffer.stale(VERSION - 1), new)
            timed("reserve", lambda draw: self._reserve(draw, VERSION), new)
            timed("commit", lambda draw: buffer.commit(f"draw{draw}", rows, VERSION), new)
            timed("claim", lambda draw: buffer.claim([buffer.index.find_ready(draw)]), new)
            timed("release", lambda draw: buffer.release([draw]), new)
            timed("regenerate", lambda draw: buffer.regenerate(draw, VERSION), middle)
            for draw in middle:
                buffer.commit(f"draw{draw}", rows, VERSION)
        gc.enable()
        assert len(buffer.stale(VERSION - 1)) == OLD
        return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs=2, default=[1_000, 100_000])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    few, many = options.groups
    print(f"{'sampler':26}{'operation':12}{few:>10,}{many:>12,} groups (us)  ratio")
    for name in SAMPLERS:
        small, large = (Bench(name, groups).measure(options.repeats) for groups in (few, many))
        for operation, time_us in small.items():
            ratio = large[operation] / time_us
            print(f"{name:26}{operation:12}{time_us:10.2f}{large[operation]:12.2f}{'':13}{ratio:7.2f}")


if __name__ == "__main__":
    main()
