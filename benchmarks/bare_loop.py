"""The quickstart's maths as a bare torch loop: the yardstick for the plugin's overhead, and a quick check of settings.

One process, nothing overlaps: sample all responses, values, one policy update, critic epochs. No Lightning, nothing of
the package. `python benchmarks/bare_loop.py --steps 100 --seed 0`
"""

import argparse
import copy
import importlib.util
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bare_sampler import Sampler
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Reward = Callable[[str, str, str], float]


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer."""
    return float(response == answer)


@dataclass(frozen=True)
class Rollout:
    """One response: ids of prompt and response, its reward, and whether it is right."""

    prompt: list[int]
    response: list[int]
    reward: float
    is_exact: bool

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded on the right: a causal model needs no attention mask then.

    Args:
        ids: [rows, T], int64.
        mask: [rows, T - 1], float32; place t is 1 where token t + 1 is part of the response.
        rewards: [rows, 1], float32: with gamma = lambda = 1 this is the return of each of the row's tokens.
    """

    ids: Tensor
    mask: Tensor
    rewards: Tensor


class Critic(nn.Module):
    """The policy's backbone with a zero head; its values are aligned with `MicroBatch.mask`."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Values [rows, T - 1] of ids [rows, T]."""
        hidden = self.backbone(input_ids=ids, use_cache=False)[0]
        return self.head(hidden).squeeze(-1)[:, :-1]


def prompt_rows(path: str | Path, rng: random.Random) -> Iterator[dict[str, str]]:
    """The file's rows for ever, shuffled anew in each epoch."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    while True:
        yield from rng.sample(rows, len(rows))


def micro_batches(rollouts: list[Rollout], token_budget: int) -> list[MicroBatch]:
    """Sort by length and cut so that rows times longest row stays within the budget."""
    groups: list[list[Rollout]] = [[]]
    for rollout in sorted(rollouts, key=len):
        if groups[-1] and (len(groups[-1]) + 1) * len(rollout) > token_budget:
            groups.append([])
        groups[-1].append(rollout)
    batches = []
    for group in groups:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row.prompt + row.response) for row in group], batch_first=True)
        mask = torch.zeros(len(group), ids.shape[1] - 1)
        for i, row in enumerate(group):
            mask[i, len(row.prompt) - 1 : len(row) - 1] = 1
        batches.append(MicroBatch(ids, mask, torch.tensor([[row.reward] for row in group])))
    return batches


def pooled(tensors: list[Tensor], batches: list[MicroBatch]) -> Tensor:
    """The response tokens' entries of all micro-batches, one after the other."""
    return torch.cat([x[b.mask > 0] for x, b in zip(tensors, batches, strict=True)])


class Normalizer:
    """`running`: centre on the bias-corrected mean of earlier steps, scale by this step's deviation about it.

    `batch`: classical whitening over the step.
    """

    def __init__(self, mode: str, decay: float = 0.9) -> None:
        self.mode, self.decay, self.total, self.weight = mode, decay, 0.0, 0.0

    def centre_and_scale(self, advantages: Tensor) -> tuple[float, float]:
        """What to subtract, and what to multiply by."""
        mean = advantages.mean().item()
        centre = mean if self.mode == "batch" else self.total / self.weight if self.weight else 0.0
        self.total = self.decay * self.total + (1 - self.decay) * mean
        self.weight = self.decay * self.weight + (1 - self.decay)
        return centre, 1 / ((advantages - centre).square().mean().sqrt().item() + 1e-8)


def rate_factor(step: int, steps: int, warmup_steps: int = 5, final: float = 0.2) -> float:
    """Linear warm-up, then linear decay from 1 to `final` at the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 1 - (1 - final) * (step + 1 - warmup_steps) / max(1, steps - warmup_steps)


def run(
    policy_folder: str | Path,
    prompts_file: str | Path,
    steps: int,
    seed: int,
    critic_epochs: int,
    lr: float,
    critic_lr: float,
    *,
    prompts_per_step: int = 128,
    generations_per_prompt: int = 1,
    normalize_advantages: str = "running",
    train_critic: bool = True,
    critic_warmup_steps: int = 0,
    max_response_tokens: int = 48,
    micro_batch_tokens: int = 768,
    clip_eps: float = 0.2,
    reward: Reward = exact_match,
    on_step: Callable[[dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Train for `steps` PPO steps.

    The policy's rate follows `rate_factor`, the critic's is constant. Without `train_critic` all values are 0 (a critic
    frozen at its zero head) and no value forward is made.

    Returns:
        `history`: one dict a step (reward, exact, explained_variance, grad norms, response tokens). `seconds` and
        `cpu_seconds`: the whole run's wall and processor time for each phase: sampling (with rewards and batching),
        values (with advantages), policy, critic.
    """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    critic = Critic(policy)
    adamw: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.0, "fused": True}
    policy_optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, **adamw)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=critic_lr, **adamw)
    sampler = Sampler(policy, policy.config.max_position_embeddings)
    rows = prompt_rows(prompts_file, random.Random(seed))
    normalizer = Normalizer(normalize_advantages)
    seconds: dict[str, float] = defaultdict(float)
    cpu_seconds: dict[str, float] = defaultdict(float)
    history = []

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        seconds[phase] += time.perf_counter() - wall
        cpu_seconds[phase] += time.process_time() - cpu

    for step in range(steps):
        with timed("sampling"):
            drawn = [row for _ in range(prompts_per_step) for row in [next(rows)] * generations_per_prompt]
            prompts = tokenizer([row["prompt"] for row in drawn])["input_ids"]
            responses = sampler.generate(prompts, max_response_tokens, policy.config.eos_token_id, rng)
            texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
            rollouts = [
                Rollout(prompt, response, reward(row["prompt"], text, row["answer"]), text == row["answer"])
                for row, prompt, response, text in zip(drawn, prompts, responses, texts, strict=True)
            ]
            batches = micro_batches(rollouts, micro_batch_tokens)
        with timed("values"), torch.no_grad():
            values = [critic(b.ids) if train_critic else torch.zeros_like(b.mask) for b in batches]
            advantages = [b.rewards - v for b, v in zip(batches, values, strict=True)]
            valid = pooled(advantages, batches)
            returns = pooled([b.rewards.expand_as(b.mask) for b in batches], batches)
            variance = returns.var().item()
            explained_variance = 1 - valid.var().item() / variance if variance > 0 else float("nan")
            centre, scale = normalizer.centre_and_scale(valid)
        policy_norm = critic_norm = 0.0
        if step >= critic_warmup_steps:
            with timed("policy"):
                for b, advantage in zip(batches, advantages, strict=True):
                    logprobs = policy(input_ids=b.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
                    logprobs = logprobs.gather(2, b.ids[:, 1:, None]).squeeze(2)
                    # One update a step: the old log-probs are this forward's own, so every ratio is exactly 1.
                    ratio = (logprobs - logprobs.detach()).exp()
                    a = (advantage - centre) * scale
                    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_eps, 1 + clip_eps))
                    ((loss * b.mask).sum() / len(valid)).backward()
                policy_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item()
                policy_optimizer.param_groups[0]["lr"] = lr * rate_factor(step, steps)
                policy_optimizer.step()
                policy_optimizer.zero_grad()
        if train_critic:
            with timed("critic"):
                for _ in range(critic_epochs):
                    for b in batches:
                        loss = 0.5 * (critic(b.ids) - b.rewards).square()
                        ((loss * b.mask).sum() / len(valid)).backward()
                    critic_norm = nn.utils.clip_grad_norm_(critic.parameters(), 1.0).item()
                    critic_optimizer.step()
                    critic_optimizer.zero_grad()
        record = {
            "reward": sum(r.reward for r in rollouts) / len(rollouts),
            "exact": sum(r.is_exact for r in rollouts) / len(rollouts),
            "explained_variance": explained_variance,
            "policy_grad_norm": policy_norm,
            "critic_grad_norm": critic_norm,
            "response_tokens": float(len(valid)),
            "prompt_tokens": float(sum(len(r.prompt) for r in rollouts)),
        }
        history.append(record)
        if on_step is not None:
            on_step(record)
    return {"history": history, "seconds": dict(seconds), "cpu_seconds": dict(cpu_seconds)}


def load_reward(spec: str) -> Reward:
    """Load `path/to/file.py:function`."""
    path, name = spec.rsplit(":", 1)
    module_spec = importlib.util.spec_from_file_location("bare_loop_reward", path)
    if module_spec is None or module_spec.loader is None:
        raise SystemExit(f"--reward={spec} is not a Python file and a function; write path/to/file.py:function")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    """Run the loop on the quickstart task; print a line every ten steps and the time of each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, default=EXAMPLES / "tiny_policy")
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "sort.jsonl")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--critic-epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--critic-lr", type=float, default=1e-3)
    parser.add_argument("--critic-warmup-steps", type=int, default=0)
    parser.add_argument("--prompts-per-step", type=int, default=128)
    parser.add_argument("--generations-per-prompt", type=int, default=1)
    parser.add_argument("--normalize-advantages", choices=("running", "batch"), default="running")
    parser.add_argument("--no-critic", action="store_true")
    parser.add_argument("--reward", default=f"{EXAMPLES / 'sloppy_sort' / 'reward.py'}:exact_match")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records: list[dict[str, float]] = []

    def report(record: dict[str, float]) -> None:
        records.append(record)
        if len(records) % 10 == 0:
            means = {name: sum(r[name] for r in records[-10:]) / 10 for name in record}
            print(f"steps to {len(records)}: " + "  ".join(f"{name} {x:.3f}" for name, x in means.items()), flush=True)

    result = run(
        args.policy,
        args.prompts,
        args.steps,
        args.seed,
        args.critic_epochs,
        args.lr,
        args.critic_lr,
        prompts_per_step=args.prompts_per_step,
        generations_per_prompt=args.generations_per_prompt,
        normalize_advantages=args.normalize_advantages,
        train_critic=not args.no_critic,
        critic_warmup_steps=args.critic_warmup_steps,
        reward=load_reward(args.reward),
        on_step=report,
    )
    for name in ("seconds", "cpu_seconds"):
        print(f"{name}: " + "  ".join(f"{phase} {x:.1f}" for phase, x in result[name].items()))


if __name__ == "__main__":
    main()
