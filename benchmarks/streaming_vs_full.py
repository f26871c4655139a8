"""Streaming against full batch on the quickstart task, engine on one core and training on the other.

`python benchmarks/streaming_vs_full.py --steps 40`
`python benchmarks/streaming_vs_full.py --engine vllm --steps 8`

One run, whose steps take turns: a sampler of our own lets every other step wait until it is complete. So both modes see
the same engine and the same minutes; on a shared machine whole runs one after the other differ by more than the modes.

With `--engine vllm` one real server generates, and the policy is a random one, whose tokens are all about as likely:
one in 42 ends a response, so that lengths are geometric, with a long tail up to 192 tokens. Few responses run at once
(`--slots`), which makes generation the slower part, as with large models. `DEFAULTS` has what suits two cores: chunks
of a few groups are cut into more micro-batches than a full batch, which costs the less the more groups a step has.

In both modes rollouts of the next step start at the refit, while the critic trains. Let G be the time until the last
group of a step is finished, counted from the refit; P the policy-side work (values, forward, backward), V the critic's,
F optimizer step and refit, p_last the policy-side work of the smallest last chunk that the tail rule allows (switching
costs nothing on a CPU). Then, from refit to refit,

    full batch   F + max(G, V) + P
    streaming    at least F + max(G + p_last, V + P)        (limits.md, section 2)

The second line is the bound. Each step's bound is computed from its own trace.
A vLLM server answers a probe after the refit, while it generates already. Those seconds R (inside F) delay the critic
but not generation, so that F + max(G + p_last, V + P) becomes F - R + max(G + p_last, R + V + P).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lightning_ppo as ppo
from lightning_ppo.batch import PromptGroup
from lightning_ppo.callbacks.refit import WeightRefit
from lightning_ppo.rollout.samplers import InOrderSampler
from lightning_ppo.rollout.tail import tail_floor
from lightning_ppo.rollout.vllm.config import VLLMConfig

ROOT = Path(__file__).resolve().parent.parent
SKIP = 4
"""First steps; the very first has no critic training to overlap with."""
TRAINER_CORE, SERVER_CORE = 0, 1
DEFAULTS: dict[str, dict[str, int]] = {
    "local": {"groups": 32, "minimum": 4, "slots": 4, "max_tokens": 48, "layers": 2},
    "vllm": {"groups": 96, "minimum": 12, "slots": 21, "max_tokens": 192, "layers": 10},
}
"""By engine. vLLM's steps take milliseconds however little they compute: more layers let training weigh as much."""


class TurnsSampler(InOrderSampler):
    """In order; odd steps are trained in full batch, even ones as they come."""

    capabilities = InOrderSampler.capabilities

    def select(self, buffer: Any, version: int, ppo_step: int, limit: int) -> Sequence[PromptGroup]:
        """Nothing of an odd step before everything is there."""
        found = super().select(buffer, version, ppo_step, limit)
        return found if mode_of(ppo_step) == "streaming" or len(found) == limit else ()


def mode_of(ppo_step: int) -> str:
    """How a step is trained."""
    return "full" if ppo_step % 2 else "streaming"


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer."""
    return float(response == answer)


class TimedRefit(WeightRefit):
    """Measures how long the proof of a refit takes."""

    seconds = 0.0

    def verify(self, *args: Any, **kwargs: Any) -> float:
        """Add up the time of every proof."""
        start = time.perf_counter()
        try:
            return super().verify(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start

    def read(self) -> float:
        """Seconds since it was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Trace(ppo.PPOCallback):
    """Records each step's period and where it went."""

    def __init__(self, tail_fraction: float, refit: TimedRefit) -> None:
        self.tail_fraction = tail_fraction
        self.refit = refit
        self.last = 0.0
        self.generation_s: list[float] = []
        self.rows: dict[str, list[dict[str, float]]] = {"full": [], "streaming": []}

    def on_chunk_ready(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: Any) -> None:
        """Collect the groups' generation times."""
        self.generation_s.extend(payload.chunk.generation_s)

    def on_ppo_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, payload: Any) -> None:
        """Record one step."""
        now, times = time.perf_counter(), {k[5:-2]: v for k, v in payload.metrics.items() if k.startswith("time/")}
        work, generation = times["value"] + times["policy"], max(self.generation_s)
        proof = self.refit.read()
        overlapped = max(generation + self.tail_fraction * work, proof + times["critic"] + work)
        bound = times["refit"] - proof + overlapped
        if payload.ppo_step > SKIP:
            # the payload counts completed steps, samplers number them from 0
            self.rows[mode_of(payload.ppo_step - 1)].append(
                {
                    "period": now - self.last,
                    "G": generation,
                    "P": work,
                    "V": times["critic"],
                    "F": times["refit"],
                    "R": proof,
                    "wait": times["wait"],
                    "chunks": payload.batch.num_chunks,
                    "bound": bound,
                }
            )
        self.last, self.generation_s = now, []


def make_policy(folder: Path, layers: int, max_tokens: int) -> None:
    """Write a random policy of the quickstart's vocabulary."""
    example = ROOT / "examples" / "tiny_policy"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(example)
    config.num_hidden_layers = layers
    # the longest prompt of examples/sort.jsonl has 38 tokens
    config.max_position_embeddings = max(config.max_position_embeddings, max_tokens + 64)
    # small enough that the head is nearly uniform
    config.initializer_range = 0.02
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's part of the data module's arguments."""
    if args.engine == "local":
        return {"local": ppo.LocalEngineConfig(slots=args.slots)}
    vllm = VLLMConfig(device="cpu", max_num_seqs=args.slots, cores=(SERVER_CORE,), trainer_cores=(TRAINER_CORE,))
    return {"engine": "vllm", "vllm": vllm}


def run(policy: Path, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Steps of both modes in turns."""
    refit = TimedRefit()
    trace = Trace(tail_floor(args.minimum) / args.groups, refit)
    module = ppo.PPOModule(
        str(policy),
        ppo=ppo.PPOConfig(normalize_advantages="running", critic_ppo_epochs=args.critic_epochs),
    )
    rollout = ppo.RolloutConfig(
        num_prompts_per_step=args.groups,
        min_groups_for_streaming_train=args.minimum,
        sampler=f"{Path(__file__).resolve()}:TurnsSampler",
        max_response_tokens=args.max_tokens,
        seed=0,
    )
    prompts = str(ROOT / "examples" / "sort.jsonl")
    data = ppo.RolloutDataModule(prompts, exact_match, rollout=rollout, **engine_settings(args))
    trainer = L.Trainer(
        strategy=ppo.StreamingPPOStrategy(),
        accelerator="cpu",
        max_epochs=2 * args.steps + SKIP,
        callbacks=[refit, trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return trace.rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=DEFAULTS, default="local")
    parser.add_argument("--steps", type=int, default=40, help="of each mode")
    parser.add_argument("--groups", type=int, help="prompt groups per step, of 4 responses each")
    parser.add_argument("--minimum", type=int, help="min_groups_for_streaming_train when streaming")
    parser.add_argument("--slots", type=int, help="few slots make generation the slower part, as with LLMs")
    parser.add_argument("--max-tokens", type=int, help="longest response")
    parser.add_argument("--layers", type=int, help="of the policy and the critic, with --engine vllm")
    parser.add_argument("--critic-epochs", type=int, default=1)
    args = parser.parse_args()
    for name, value in DEFAULTS[args.engine].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with tempfile.TemporaryDirectory() as folder:
        policy = ROOT / "examples" / "tiny_policy"
        if args.engine == "vllm":
            policy = Path(folder) / "policy"
            make_policy(policy, args.layers, args.max_tokens)
        rows = run(policy, args)

    def median(mode: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[mode])

    names = ("period", "G", "P", "V", "F", "R", "wait", "chunks")
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
