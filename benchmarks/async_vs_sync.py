"""The quickstart task, synchronous against asynchronous on the same cores: does running ahead cost reward?

`python benchmarks/async_vs_sync.py --steps 40 --seeds 0 1 2`

Synchronous: `rollout.colocated`, generation and training take turns. On-policy: the default, generation of the next
step overlaps the critic's training. Asynchronous: one version ahead, age at most 1, truncated importance weights.
Runs of one seed follow each other; compare their times as ratios only.
"""

import argparse
import statistics

from runs import fit

FULL = "--data.rollout.min_groups_for_streaming_train=128"
VARIANTS = {
    "synchronous": [FULL, "--data.rollout.colocated=true"],
    "on-policy": [],
    "asynchronous": [
        "--data.rollout.max_lookahead_versions=1",
        "--model.ppo.importance_correction=truncated",
    ],
}


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="PPO steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    common = [f"--trainer.max_epochs={args.steps}", f"--trainer.check_val_every_n_epoch={args.steps}"]
    common += [f"--model.policy_scheduler.init_args.total_steps={args.steps}", "--trainer.enable_checkpointing=false"]
    print("seed  run           first 5  last 5  validation  mult error  policy age  s/step  ratio", flush=True)
    for seed in args.seeds:
        base_s = None
        for name, overrides in VARIANTS.items():
            scalars = fit("quickstart", seed, [*common, *overrides]).scalars
            reward, step_s = scalars["rollout/reward_mean"], scalars["time/step_s"]
            # the first steps include imports and warm-up
            seconds = statistics.median(step_s[5:])
            base_s = base_s or seconds
            error = statistics.mean(scalars["rollout/token_mult_prob_error"])
            age = statistics.mean(scalars["rollout/policy_age_mean"])
            print(
                f"{seed:4d}  {name:12s}  {statistics.mean(reward[:5]):7.3f}  {statistics.mean(reward[-5:]):6.3f}"
                f"  {scalars['val/reward_mean'][-1]:10.3f}  {error:10.5f}  {age:10.3f}  {seconds:6.3f}"
                f"  {base_s / seconds:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
