"""Learning curves over seeds: the quickstart, or the offset task with and without its critic.

`python benchmarks/seed_table.py quickstart --seeds 0 1 2 3 4 --figure docs/quickstart.png`
`python benchmarks/seed_table.py offset --seeds 0 1 2`

Every run is the command line's own (`lightning-ppo fit`), one after the other; numbers come from its TensorBoard file.
Without its critic the offset run is REINFORCE with the batch mean as baseline: critic frozen at its zero head,
lambda 1, advantages whitened. Exact match there is sampled at temperature 1 on the validation prompts, at the end.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from runs import ROOT, fit

sys.path.insert(0, str(ROOT / "examples" / "sloppy_sort"))

NO_CRITIC = [
    "--trainer.callbacks+=lightning_ppo.callbacks.FrozenCritic",
    "--model.ppo.normalize_advantages=batch",
    "--model.ppo.critic_warmup_steps=0",
]


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    seed: int
    wall_s: float
    reward: list[float]
    """Mean training reward of every PPO step."""
    validation: float
    explained_variance: float
    """Mean of the last five steps."""


def measure(config: str, seed: int, extra: list[str]) -> Outcome:
    """Run the command line once."""
    run = fit(config, seed, extra)
    variance = run.scalars["critic/explained_variance"][-5:]
    return Outcome(
        seed,
        run.wall_s,
        run.scalars["rollout/reward_mean"],
        run.scalars["val/reward_mean"][-1],
        sum(variance) / len(variance),
    )


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Return means over the last `width` values, from the `width`-th on."""
    return [sum(values[i - width : i]) / width for i in range(width, len(values) + 1)]


def quickstart(seeds: list[int], figure: str | None) -> None:
    """Print the table of the main job; draw its curves."""
    outcomes = []
    print("seed  first 5  step of >.9  last 5  greedy validation  wall s  5-step means at 5, 15, ...", flush=True)
    for seed in seeds:
        run = measure("quickstart", seed, [])
        outcomes.append(run)
        means = smooth(run.reward)
        hit = next((i + 5 for i, mean in enumerate(means) if mean > 0.9), None)
        curve = " ".join(f"{mean:.2f}" for mean in means[::10])
        print(
            f"{seed:4d}  {means[0]:7.3f}  {hit!s:>11s}  {means[-1]:6.3f}  {run.validation:17.3f}  {run.wall_s:6.0f}"
            f"  {curve}",
            flush=True,
        )
    if figure is not None:
        draw(outcomes, Path(figure))


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Draw one reward curve per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 3.6), dpi=120)
    for run in outcomes:
        axes.plot(range(5, len(run.reward) + 1), smooth(run.reward), label=f"seed {run.seed}", linewidth=1.5)
    axes.axhline(0.9, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="PPO step", ylabel="mean reward (5 steps)", ylim=(0, 1), title="configs/quickstart.yaml")
    axes.legend(frameon=False, ncols=2, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    chart.tight_layout()
    chart.savefig(path)
    print(f"wrote {path}")


def offset(seeds: list[int], rates: list[float]) -> None:
    """Print the table of the run with its critic against runs without."""
    from reward import exact_match_with_offset

    rows = [json.loads(line) for line in (ROOT / "examples/sort_validation.jsonl").read_text().splitlines()]
    shift = sum(exact_match_with_offset(row["prompt"], "", row["answer"]) for row in rows) / len(rows)
    sampled = ["--data.rollout.validation_temperature=1.0"]
    print("seed  run                     exact match  explained variance  wall s", flush=True)
    for seed in seeds:
        kinds = [("with critic", sampled)]
        kinds += [
            (f"no critic, lr {r:g}", [*sampled, *NO_CRITIC, f"--model.policy_optimizer.init_args.lr={r}"])
            for r in rates
        ]
        for name, extra in kinds:
            run = measure("offset", seed, extra)
            exact = run.validation - shift
            print(
                f"{seed:4d}  {name:22s}  {exact:11.3f}  {run.explained_variance:18.2f}  {run.wall_s:6.0f}", flush=True
            )


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("quickstart", "offset"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--figure", help="where to draw the quickstart's curves (needs matplotlib)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[7e-4, 3e-4], help="learning rates without the critic"
    )
    args = parser.parse_args()
    if args.task == "quickstart":
        quickstart(args.seeds, args.figure)
    else:
        offset(args.seeds, args.rates)


if __name__ == "__main__":
    main()
