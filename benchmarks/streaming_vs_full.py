"""Streaming against full batch on the quickstart task, engine on one core and training on the other.

`python benchmarks/streaming_vs_full.py --steps 20 --rounds 3 --slots 4`

In both modes rollouts of the next step start at the refit, while the critic trains. Let G be the time until the last
group of a step is finished, counted from the refit; P the policy-side work (values, forward, backward), V the critic's,
F optimizer step and refit, p_last the policy-side work of the smallest last chunk that the tail rule allows (switching
costs nothing on a CPU). Then, from refit to refit,

    full batch   F + max(G, V) + P
    streaming    at least F + max(G + p_last, V + P)        (limits.md, section 2)

The second line is the bound. Each step's bound is computed from its own trace. Rounds of both modes alternate.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L

import lightning_ppo as ppo
from lightning_ppo.rollout.tail import tail_floor

ROOT = Path(__file__).resolve().parent.parent
SKIP = 3
"""First steps of a round; the very first has no critic training to overlap with."""


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer."""
    return float(response == answer)


class Trace(ppo.PPOCallback):
    """Records each step's period and where it went."""

    def __init__(self, tail_fraction: float) -> None:
        self.tail_fraction = tail_fraction
        self.last = 0.0
        self.generation_s: list[float] = []
        self.rows: list[dict[str, float]] = []

    def on_chunk_ready(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: Any) -> None:
        """Collect the groups' generation times."""
        self.generation_s.extend(payload.chunk.generation_s)

    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: Any) -> None:
        """Record one step."""
        now, times = time.perf_counter(), {k[5:-2]: v for k, v in payload.metrics.items() if k.startswith("time/")}
        work, generation = times["value"] + times["policy"], max(self.generation_s)
        bound = times["refit"] + max(generation + self.tail_fraction * work, times["critic"] + work)
        if payload.ppo_step > SKIP:
            self.rows.append(
                {
                    "period": now - self.last,
                    "G": generation,
                    "P": work,
                    "V": times["critic"],
                    "F": times["refit"],
                    "wait": times["wait"],
                    "chunks": payload.batch.num_chunks,
                    "bound": bound,
                }
            )
        self.last, self.generation_s = now, []


def run(minimum: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """One round: streaming when `minimum` is below the step's groups."""
    floor = tail_floor(minimum) if minimum < args.groups else args.groups
    trace = Trace(floor / args.groups)
    module = ppo.PPOModule(
        str(ROOT / "examples" / "tiny_policy"),
        ppo=ppo.PPOConfig(normalize_advantages="running", critic_ppo_epochs=args.critic_epochs),
    )
    rollout = ppo.RolloutConfig(
        num_prompts_per_step=args.groups, min_groups_for_streaming_train=minimum, max_response_tokens=48, seed=0
    )
    engine = ppo.LocalEngineConfig(slots=args.slots)
    data = ppo.RolloutDataModule(str(ROOT / "examples" / "sort.jsonl"), exact_match, rollout=rollout, local=engine)
    trainer = L.Trainer(
        strategy=ppo.StreamingPPOStrategy(),
        accelerator="cpu",
        max_epochs=args.steps + SKIP,
        callbacks=[trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return trace.rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=32, help="prompt groups per step, of 4 responses each")
    parser.add_argument("--minimum", type=int, default=4, help="min_groups_for_streaming_train when streaming")
    parser.add_argument("--slots", type=int, default=4, help="few slots make generation the slower part, as with LLMs")
    parser.add_argument("--critic-epochs", type=int, default=1)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"full": [], "streaming": []}
    for _ in range(args.rounds):
        rows["full"] += run(args.groups, args)
        rows["streaming"] += run(args.minimum, args)

    def median(mode: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[mode])

    names = ("period", "G", "P", "V", "F", "wait", "chunks")
    print(f"load {os.getloadavg()[0]:.1f}; medians over {len(rows['full'])} steps, seconds")
    print("mode       " + "".join(f"{name:>9s}" for name in names))
    for mode in rows:
        print(f"{mode:10s} " + "".join(f"{median(mode, name):9.3f}" for name in names))
    print(f"generation hidden: full {1 - median('full', 'wait') / median('full', 'G'):.0%}", end=", ")
    print(f"streaming {1 - median('streaming', 'wait') / median('streaming', 'G'):.0%}")
    print(f"speed-up of streaming: {median('full', 'period') / median('streaming', 'period'):.2f}x")
    reached = statistics.median(row["bound"] / row["period"] for row in rows["streaming"])
    best = median("full", "period") / median("streaming", "bound")
    print(f"bound for this trace: {median('streaming', 'bound'):.3f} s ({best:.2f}x); reached {reached:.0%} of it")


if __name__ == "__main__":
    main()
