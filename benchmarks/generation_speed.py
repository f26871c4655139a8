"""Response tokens per second of one core: the built-in engine against two ways of transformers, in one run.

    python benchmarks/generation_speed.py

The policy has the quickstart's size. Its output layer is nearly uniform and four of its 42 tokens stop, so responses
are geometric with a mean of about 10 tokens and at most 48. Times are CPU seconds (of the engine's process for ours),
so that other work on the machine disturbs little; the methods take turns, `--repeats` times, and the best run counts.
"""

import argparse
import asyncio
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from lightning_ppo.rollout.engine import GenerationRequest, PolicySpec, SamplingParams
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig

VOCAB = 42
STOPS = [1, 2, 3, 4]
MAX_TOKENS = 48
CONTEXT = 96

Prompt = tuple[int, ...]
Result = tuple[int, float]


def make_policy() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_prompts(count: int, per_prompt: int) -> list[Prompt]:
    """`^`, n symbols, `=`, each `per_prompt` times: n is 3 plus a geometric number, or (8 %) uniform in 16 to 36."""
    rng = random.Random(0)
    prompts: list[Prompt] = []
    for _ in range(count // per_prompt):
        symbols = rng.randint(16, 36) if rng.random() < 0.08 else min(36, 3 + int(rng.expovariate(1 / 5)))
        prompts += [(5, *(rng.randrange(6, VOCAB) for _ in range(symbols)), 5)] * per_prompt
    return prompts


@contextmanager
def local_engine(policy: Any, slots: int) -> Iterator[Callable[[list[Prompt]], Result]]:
    engine = LocalEngine(LocalEngineConfig(slots=slots))
    engine.start(PolicySpec(policy.config.to_json_string(use_diff=False), CONTEXT))
    engine.update_weights(policy.state_dict().items(), 0)
    process = psutil.Process(engine.pid)
    sampling = SamplingParams(MAX_TOKENS, stop_token_ids=tuple(STOPS))

    def run(prompts: list[Prompt]) -> Result:
        async def everything() -> int:
            requests = (GenerationRequest(str(i), prompt, sampling, i) for i, prompt in enumerate(prompts))
            return sum(len(g.token_ids) for g in await asyncio.gather(*map(engine.generate, requests)))

        before = process.cpu_times()
        tokens = asyncio.run(everything())
        after = process.cpu_times()
        return tokens, after.user + after.system - before.user - before.system

    try:
        yield run
    finally:
        engine.close()


def settings() -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, top_p=1.0, eos_token_id=STOPS, pad_token_id=0
    )


def transformers_generate(policy: Any, slots: int) -> Callable[[list[Prompt]], Result]:
    def run(prompts: list[Prompt]) -> Result:
        tokens, start = 0, time.process_time()
        for first in range(0, len(prompts), slots):
            batch = prompts[first : first + slots]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            output = policy.generate(input_ids=ids, attention_mask=mask, generation_config=settings())[:, longest:]
            stopped = torch.isin(output, torch.tensor(STOPS))
            tokens += int(torch.where(stopped.any(1), stopped.int().argmax(1) + 1, output.shape[1]).sum())
        return tokens, time.process_time() - start

    return run


def continuous_batching(policy: Any, slots: int) -> Callable[[list[Prompt]], Result]:
    from transformers import ContinuousBatchingConfig

    def run(prompts: list[Prompt]) -> Result:
        # One key-value block holds 256 tokens here; every slot may need one per layer group.
        config = ContinuousBatchingConfig(max_batch_tokens=max(512, slots), num_blocks=slots)
        start = time.process_time()
        outputs = policy.generate_batch(
            inputs=[list(p) for p in prompts], generation_config=settings(), continuous_batching_config=config
        )
        spent = time.process_time() - start
        return sum(len(output.generated_tokens) for output in outputs.values()), spent

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    policy = make_policy()
    prompts = make_prompts(args.requests, args.per_prompt)
    with local_engine(policy, args.slots) as ours:
        methods = {
            "lightning_ppo local engine": ours,
            "transformers generate": transformers_generate(policy, args.slots),
            "transformers generate_batch (continuous batching)": continuous_batching(policy, args.slots),
        }
        best: dict[str, float] = {}
        for _ in range(args.repeats):
            for name, run in list(methods.items()):
                try:
                    tokens, spent = run(prompts)
                except Exception as error:  # a benchmark of somebody else's code: say why and go on
                    print(f"{name}: does not run here: {type(error).__name__}: {str(error).splitlines()[0]}")
                    del methods[name]
                    continue
                if tokens == 0:
                    print(f"{name}: does not run here: it returned no token")
                    del methods[name]
                    continue
                best[name] = max(best.get(name, 0.0), tokens / spent)
    own = best["lightning_ppo local engine"]
    print(
        f"{len(prompts)} requests, {args.per_prompt} per prompt, {args.slots} slots, 1 thread, tokens per CPU second:"
    )
    for name, speed in best.items():
        print(f"  {name:<50} {speed:8.0f} tok/s   ours is {own / speed:.1f}x")


if __name__ == "__main__":
    main()
