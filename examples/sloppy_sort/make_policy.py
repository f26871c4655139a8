"""Make the tiny policy of the sloppy sort task: `python examples/sloppy_sort/make_policy.py` (about 20 s).

A Llama-style model of 0.39 M parameters imitates the sloppy demonstrator for 150 steps, so that PPO starts from a
policy that solves somewhat more than a quarter of the prompts. The result is a plain Hugging Face folder with its
tokenizer. The same seed gives the same weights on the same machine and torch build.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from task import EOS_ID, PAD_ID, SYMBOLS, Problem, demonstrate, sample_problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / "tiny_policy"
CONTEXT_TOKENS = 256
EVALUATION_SEED = 10**6
IGNORED_LABEL = -100


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on the demonstrator.

    Args:
        steps: Optimizer steps; the rate rises over `warmup_steps`, then falls linearly, to a tenth at the lowest.
        warmup_steps: Steps until the full rate.
        batch_rows: Demonstrations a step; four batches at a time are cut from a pool that is sorted by length, because
            padding would otherwise be most of the work.
        learning_rate: Peak rate of AdamW.
        seed: Seed of the first weights and of the demonstrations.
    """

    steps: int = 150
    warmup_steps: int = 30
    batch_rows: int = 64
    learning_rate: float = 3e-3
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * max(0.1, 1 - step / self.steps)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the 42 symbols.

    There is no unknown token: any other character, a space too, makes the tokenizer raise, as a prompt that the policy
    has never seen a symbol of is a mistake in the data. Nothing is added in front or behind. Decoding joins symbols
    without spaces.
    """
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SYMBOLS[PAD_ID],
        eos_token=SYMBOLS[EOS_ID],
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """The untrained policy. Heads of 32: the smallest size that vLLM's CPU attention serves."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def encode(text: str) -> list[int]:
    """Token ids of a text of known symbols."""
    return [SYMBOLS.index(symbol) for symbol in text]


def demonstration_batches(settings: WarmStart, rng: random.Random) -> list[list[tuple[str, str]]]:
    """Four batches of (prompt, response), each of similar lengths, in random order."""
    pool = []
    for _ in range(4 * settings.batch_rows):
        problem = sample_problem(rng)
        pool.append((problem.prompt, demonstrate(problem, rng)))
    pool.sort(key=lambda row: len(row[0]) + len(row[1]))
    batches = [pool[i * settings.batch_rows : (i + 1) * settings.batch_rows] for i in range(4)]
    rng.shuffle(batches)
    return batches


def imitation_loss(model: LlamaForCausalLM, rows: list[tuple[str, str]]) -> torch.Tensor:
    """Mean cross-entropy over the responses' tokens; prompts and padding carry no loss."""
    length = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), length), PAD_ID)
    labels = torch.full((len(rows), length), IGNORED_LABEL)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(encode(prompt + response))
        labels[i, len(prompt) : end] = ids[i, len(prompt) : end]
    logits = model(input_ids=ids, attention_mask=(ids != PAD_ID).long(), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)


def warm_start(model: LlamaForCausalLM, settings: WarmStart) -> None:
    """Train the model in place on the sloppy demonstrator."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches: list[list[tuple[str, str]]] = []
    progress = tqdm(range(settings.steps), desc="imitating the sloppy demonstrator")
    for step in progress:
        batches = batches or demonstration_batches(settings, rng)
        loss = imitation_loss(model, batches.pop(0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = settings.rate(step)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")


@torch.inference_mode()
def exact_match_rate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], greedy: bool
) -> float:
    """Share of problems that the policy solves, sampled at temperature 1 (seeded) or greedily."""
    torch.manual_seed(EVALUATION_SEED)
    inputs = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=48, **sampling
    )
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == problem.answer for text, problem in zip(texts, problems, strict=True)) / len(problems)


def main() -> None:
    """Train the policy, print how good it is, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the Hugging Face folder goes")
    parser.add_argument("--steps", type=int, default=WarmStart.steps)
    parser.add_argument("--seed", type=int, default=WarmStart.seed)
    parser.add_argument("--eval-prompts", type=int, default=256)
    args = parser.parse_args()
    # One thread: the order of additions, and with it the weights, would depend on the machine's core count.
    torch.set_num_threads(1)
    tokenizer, model = make_tokenizer(), make_model(args.seed)
    warm_start(model, WarmStart(steps=args.steps, seed=args.seed))
    rng = random.Random(EVALUATION_SEED)
    problems = [sample_problem(rng) for _ in range(args.eval_prompts)]
    model.eval()
    for name, greedy in (("sampled", False), ("greedy", True)):
        rate = exact_match_rate(model, tokenizer, problems, greedy)
        print(f"exact match, {name}: {rate:.3f} of {len(problems)} prompts")
    model.save_pretrained(args.folder)
    # Padding a batch above has switched padding on inside that tokenizer, and saving would keep it.
    make_tokenizer().save_pretrained(args.folder)
    print(f"{args.folder}: {model.num_parameters() / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
