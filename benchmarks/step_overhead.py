"""What Lightning and the plugin cost: a PPO step of ours against a bare torch loop doing the same maths, in one run.

`python benchmarks/step_overhead.py --steps 20 --rounds 3`

Both sides train the quickstart's policy and critic on 128 responses per step, one policy update, one critic epoch, one
thread. Compared is the time per token spent on everything but generation and waiting for it. Responses come ready-made
from an engine that computes nothing, with lengths like the quickstart's: the real one works on the other core while the
critic trains, and what the two take from each other's caches is no cost of the plugin (`--engine local` shows it). The
rounds of both sides alternate, so that a busy machine hurts both; medians are compared. Processor time is the training
thread's own: it leaves out what other programs, and the collector's thread behind the interpreter lock, take from it.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from bare_loop import run as run_bare

import lightning_ppo as ppo
from lightning_ppo.rollout.engine import Engine, GenerationRequest
from lightning_ppo.testing import FakeEngine

ROOT = Path(__file__).resolve().parent.parent
POLICY, PROMPTS = ROOT / "examples" / "tiny_policy", ROOT / "examples" / "sort.jsonl"
CRITIC_EPOCHS = 1
MICRO_BATCH_TOKENS = 1024
SKIP = 2
"""First steps of a round, which warm allocators and caches up."""


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer."""
    return float(response == answer)


class Clock(ppo.PPOCallback):
    """Takes the time from the end of one PPO step to the end of the next, Lightning's part included."""

    def __init__(self) -> None:
        self.last = self.last_cpu = 0.0
        self.rows: list[dict[str, float]] = []

    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: Any) -> None:
        """Record one step."""
        now, cpu = time.perf_counter(), time.thread_time()
        tokens = sum(row.trajectory.num_tokens for row in payload.batch.rows)
        if payload.ppo_step > SKIP:
            busy = {name: payload.metrics[f"time/{name}_s"] for name in ("value", "policy", "critic")}
            wall = now - self.last - payload.metrics["time/wait_s"]
            self.rows.append({"wall": wall, "cpu": cpu - self.last_cpu, "tokens": tokens, **busy})
        self.last, self.last_cpu = now, cpu


class ReadyMade(ppo.RolloutDataModule):
    """Rollouts from an engine that computes nothing."""

    def make_engine(self) -> Engine:
        """Answer at once, with 2 to 48 tokens, 11 on average."""

        def length(request: GenerationRequest) -> int:
            return min(48, 2 + int(random.Random(request.seed).expovariate(1 / 9)))

        return FakeEngine(length=length)


def run_ours(steps: int, engine: str) -> list[dict[str, float]]:
    """One round of ours: full-batch steps with the quickstart's settings."""
    clock = Clock()
    module = ppo.PPOModule(
        str(POLICY), ppo=ppo.PPOConfig(critic_ppo_epochs=CRITIC_EPOCHS, micro_batch_tokens=MICRO_BATCH_TOKENS)
    )
    rollout = ppo.RolloutConfig(
        num_prompts_per_step=128,
        num_generations_per_prompt=1,
        min_groups_for_streaming_train=128,
        max_response_tokens=48,
    )
    kind = ppo.RolloutDataModule if engine == "local" else ReadyMade
    data = kind(str(PROMPTS), exact_match, rollout=rollout)
    trainer = L.Trainer(
        strategy=ppo.StreamingPPOStrategy(),
        accelerator="cpu",
        max_epochs=steps + SKIP,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return clock.rows


def run_yardstick(steps: int) -> dict[str, float]:
    """One round of the bare loop: seconds per token for each phase."""
    # Lightning sets all cores in every fit, unless OMP_NUM_THREADS says something
    torch.set_num_threads(1)
    result = run_bare(
        POLICY,
        PROMPTS,
        steps,
        0,
        CRITIC_EPOCHS,
        6e-4,
        1e-3,
        prompts_per_step=128,
        generations_per_prompt=1,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    tokens = sum(record["response_tokens"] + record["prompt_tokens"] for record in result["history"])
    phases = ("values", "policy", "critic")
    cpu = sum(result["cpu_seconds"][name] for name in phases)
    return {"cpu": cpu / tokens, **{name: result["seconds"][name] / tokens for name in phases}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("none", "local"), default="none")
    args = parser.parse_args()
    bare, rows, ratios = [], [], []
    for _ in range(args.rounds):
        bare.append(run_yardstick(args.steps))
        mine = run_ours(args.steps, args.engine)
        ratios.append(statistics.median(row["cpu"] / row["tokens"] for row in mine) / bare[-1]["cpu"])
        rows += mine

    def ours(name: str) -> float:
        return statistics.median(row[name] / row["tokens"] for row in rows) * 1e6

    def yard(name: str) -> float:
        return statistics.median(row[name] for row in bare) * 1e6

    pairs = (("value", "values"), ("policy", "policy"), ("critic", "critic"))
    print("us per token            bare    ours   ratio")
    for name, other in pairs:
        print(f"{name:20s} {yard(other):7.1f} {ours(name):7.1f} {ours(name) / yard(other):7.3f}")
    wall, yardstick = ours("wall"), sum(yard(other) for _, other in pairs)
    inside = statistics.median(sum(row[n] for n, _ in pairs) / row["tokens"] for row in rows) * 1e6
    print(f"{'whole step - wait':20s} {yardstick:7.1f} {wall:7.1f} {wall / yardstick:7.3f}")
    print(f"{'processor time':20s} {yard('cpu'):7.1f} {ours('cpu'):7.1f} {ours('cpu') / yard('cpu'):7.3f}")
    print(f"outside of the three phases: {(wall - inside) / wall:.1%} of a step (refit, hooks, loops, counters)")
    print("overhead against the bare loop, processor time of the training thread, round by round:", end=" ")
    print(", ".join(f"{ratio - 1:+.1%}" for ratio in ratios), f"(median {statistics.median(ratios) - 1:+.1%})")


if __name__ == "__main__":
    main()
