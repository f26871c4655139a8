"""The quickstart's task: prompts, tokenizer, policy and rewards as shipped, and the scripts that made them."""

import importlib
import importlib.util
import itertools
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = EXAMPLES / "sloppy_sort"
POLICY = EXAMPLES / "tiny_policy"

torch.set_num_threads(1)


def import_from(folder, name):
    """Import a script's module as running that script would: with its own folder first on the path."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


task = import_from(SCRIPTS, "task")
make_prompts = import_from(SCRIPTS, "make_prompts")
make_policy = import_from(SCRIPTS, "make_policy")
bare_loop = import_from(ROOT / "benchmarks", "bare_loop")


@pytest.fixture(scope="module")
def reward():
    """The rewards, loaded by path alone, as the command line does."""
    spec = importlib.util.spec_from_file_location("reward_by_path", SCRIPTS / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY, local_files_only=True)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(POLICY, local_files_only=True)


def rows(name):
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


# Tokenizer


def test_one_symbol_is_one_token_with_its_place_as_id(tokenizer):
    assert task.SYMBOLS == "#$^=|!abcdefghijklmnopqrstuvwxyz0123456789"
    assert len(tokenizer) == 42
    assert tokenizer.encode(task.SYMBOLS) == list(range(42))


def test_encode_adds_nothing_and_decode_gives_the_text_back(tokenizer):
    text = "^k3a9z=39akz$"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_pad_and_eos_and_can_be_skipped(tokenizer):
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("#", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("$", 1)
    assert tokenizer.decode(tokenizer.encode("^b|a!=ab$##"), skip_special_tokens=True) == "^b|a!=ab"
    assert tokenizer.bos_token is None
    assert tokenizer.unk_token is None


@pytest.mark.parametrize("text", ["^A=", "a b", "a\nb", "\u00e4"])
def test_unknown_characters_raise(tokenizer, text):
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        tokenizer.encode(text)


def test_a_batch_is_padded_on_the_left_only_when_asked(tokenizer):
    assert tokenizer(["^a=", "^abc="])["input_ids"] == [[2, 6, 3], [2, 6, 7, 8, 3]]
    padded = tokenizer(["^a=", "^abc="], padding=True)
    assert padded["input_ids"] == [[0, 0, 2, 6, 3], [2, 6, 7, 8, 3]]
    assert padded["attention_mask"][0] == [0, 0, 1, 1, 1]


def test_shipped_tokenizer_is_what_the_script_makes(tokenizer, tmp_path):
    make_policy.make_tokenizer().save_pretrained(tmp_path)
    made, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, POLICY))
    assert made == shipped


# Prompts


def test_same_seed_same_prompts_and_other_seed_other_prompts():
    first, again, other = (make_prompts.make_problems(50, 10, seed) for seed in (3, 3, 4))
    assert first == again != other


def test_shipped_files_are_what_the_generator_writes():
    train, validation = make_prompts.make_problems(
        make_prompts.TRAIN_ROWS, make_prompts.VALIDATION_ROWS, make_prompts.SEED
    )
    assert (EXAMPLES / "sort.jsonl").read_text(encoding="utf-8") == make_prompts.to_jsonl(train)
    assert (EXAMPLES / "sort_validation.jsonl").read_text(encoding="utf-8") == make_prompts.to_jsonl(validation)
    assert (EXAMPLES / "sort.jsonl").stat().st_size < 400_000


@pytest.mark.parametrize(("name", "count"), [("sort.jsonl", 4096), ("sort_validation.jsonl", 256)])
def test_every_shipped_answer_is_right(name, count):
    shipped = rows(name)
    assert len(shipped) == count
    for row in shipped:
        assert row.keys() == {"prompt", "answer"}
        assert (row["prompt"][0], row["prompt"][-1]) == ("^", "=")
        symbols = row["prompt"][1:-1]
        assert len(set(symbols)) == len(symbols) == len(row["answer"])
        # Letters before digits: the opposite of the characters' own order.
        letters = "".join(sorted(c for c in symbols if c.isalpha()))
        assert row["answer"] == letters + "".join(sorted(c for c in symbols if c.isdigit()))


def test_no_prompt_occurs_twice():
    prompts = [row["prompt"] for name in ("sort.jsonl", "sort_validation.jsonl") for row in rows(name)]
    assert len(set(prompts)) == len(prompts)


def test_lengths_have_the_long_tail_of_the_law():
    lengths = sorted(len(row["answer"]) for row in rows("sort.jsonl"))
    assert (lengths[0], lengths[-1]) == (3, 36)
    assert 9.5 < statistics.mean(lengths) < 11
    assert 6 <= lengths[len(lengths) // 2] <= 8
    # 0.08 of the rows are uniform on 16..36, so 0.04 of all lie above 26, and 0.02 to 0.03 of the geometric part do.
    assert 0.05 < sum(n >= 26 for n in lengths) / len(lengths) < 0.09


def test_the_demonstrator_drops_blind_symbols_more_often_than_not():
    rng = random.Random(0)
    problem = task.Problem("^9a7c5=", "ac579")
    demos = [task.demonstrate(problem, rng) for _ in range(2000)]
    kept = {symbol: sum(symbol in demo for demo in demos) / len(demos) for symbol in "ac579"}
    assert kept["c"] == pytest.approx(0.45 * 0.99, abs=0.05)
    assert all(kept[symbol] > 0.97 for symbol in "a579" if task.ALPHABET.index(symbol) % 5 != 2)
    assert all(demo.endswith("$") and demo.count("$") == 1 for demo in demos)


def test_prompt_script_writes_both_files_when_run_by_its_path(tmp_path):
    command = [sys.executable, str(SCRIPTS / "make_prompts.py"), "--folder", str(tmp_path), "--train-rows", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "sort.jsonl: 20 rows" in done.stdout
    first = [json.dumps(row) for row in rows("sort.jsonl")[:20]]
    assert (tmp_path / "sort.jsonl").read_text().splitlines() == first


# Policy


def test_policy_shape(policy):
    assert sum(p.numel() for p in policy.parameters()) == policy.num_parameters() == 388_224
    config = policy.config
    assert (config.head_dim, config.num_attention_heads, config.num_hidden_layers) == (32, 4, 2)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (128, 320, 42)
    assert (config.max_position_embeddings, config.pad_token_id, config.eos_token_id) == (256, 0, 1)
    assert policy.lm_head.weight is not policy.model.embed_tokens.weight
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert (policy.generation_config.eos_token_id, policy.generation_config.pad_token_id) == (1, 0)
    assert sum(f.stat().st_size for f in POLICY.iterdir()) < 1_700_000


def test_warm_start_repeats_from_its_seed_and_lowers_the_loss():
    def train(seed):
        model = make_policy.make_model(seed)
        make_policy.warm_start(model, make_policy.WarmStart(steps=3, warmup_steps=1, batch_rows=8, seed=seed))
        return model

    first, again, other = train(0), train(0), train(1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    batch = make_policy.demonstration_batches(make_policy.WarmStart(batch_rows=16), random.Random(9))[0]
    with torch.no_grad():
        before = make_policy.imitation_loss(make_policy.make_model(0), batch)
        assert make_policy.imitation_loss(first, batch) < before - 0.05


def test_imitation_loss_counts_response_tokens_only(policy):
    batch = [("^ba=", "ab$"), ("^dcfe=", "cdef$")]
    logits = [policy(input_ids=torch.tensor([make_policy.encode(p + r)])).logits[0].log_softmax(-1) for p, r in batch]
    terms = [
        -scores[len(p) - 1 + i, make_policy.encode(r)[i]]
        for scores, (p, r) in zip(logits, batch, strict=True)
        for i in range(len(r))
    ]
    torch.testing.assert_close(make_policy.imitation_loss(policy, batch), torch.stack(terms).mean())


@pytest.mark.slow
def test_policy_script_writes_a_folder_that_loads(tmp_path):
    command = [sys.executable, str(SCRIPTS / "make_policy.py"), "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--steps", "1", "--eval-prompts", "4"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "exact match, sampled: 0.000 of 4 prompts" in done.stdout
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(POLICY / "model.safetensors").keys()
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).encode("^a=") == [2, 6, 3]


@pytest.mark.parametrize("greedy", [False, True])
def test_shipped_policy_starts_between_a_fifth_and_a_half(policy, tokenizer, greedy):
    problems = [task.Problem(**row) for row in rows("sort_validation.jsonl")[:128]]
    assert 0.2 < make_policy.exact_match_rate(policy, tokenizer, problems, greedy) < 0.45


# Rewards


@pytest.mark.parametrize(
    ("response", "value"), [("ab7", 1.0), ("ab", 0.0), ("ab7b", 0.0), ("", 0.0), ("ab7=", 0.0), (" ab7", 0.0)]
)
def test_exact_match(reward, response, value):
    assert reward.exact_match("^7ba=", response, "ab7") == value


@pytest.mark.parametrize(("prompt", "twice_the_id"), [("^a7b=", 12), ("^zab=", 62), ("^0ab=", 116), ("^9ab=", 134)])
def test_offset_depends_on_the_first_symbol_only(reward, prompt, twice_the_id):
    offset = 1.5 * (twice_the_id / 68 - 1)
    assert reward.exact_match_with_offset(prompt, "wrong", "right") == pytest.approx(offset)
    assert reward.exact_match_with_offset(prompt, "right", "right") == pytest.approx(1 + offset)
    assert reward.exact_match_with_offset(prompt[:2] + "x=", "wrong", "right") == pytest.approx(offset)


def test_offset_is_wider_than_the_match(reward):
    offsets = [reward.exact_match_with_offset(f"^{symbol}=", "", "x") for symbol in task.ALPHABET]
    assert statistics.pstdev(offsets) == pytest.approx(0.916, abs=0.01)
    assert (min(offsets), max(offsets)) == pytest.approx((-1.235, 1.456), abs=1e-3)


# The bare loop


def test_bare_sampler_agrees_with_transformers(policy, tokenizer, monkeypatch):
    prompts = [row["prompt"] for row in rows("sort_validation.jsonl")[:12]]
    monkeypatch.setattr(torch, "multinomial", lambda probs, count, generator: probs.argmax(-1, keepdim=True))
    sampler = bare_loop.Sampler(policy, 256)
    ours = sampler.generate([tokenizer.encode(p) for p in prompts], 40, 1, torch.Generator())
    for prompt, response in zip(prompts, ours, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        mask = torch.ones_like(ids)
        theirs = policy.generate(input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert theirs[0, ids.shape[1] :].tolist() == response


@pytest.mark.parametrize("normalize_advantages", ["running", "batch"])
def test_bare_loop_repeats_and_trains_both_models(normalize_advantages):
    def train(seed):
        return bare_loop.run(
            *(POLICY, EXAMPLES / "sort.jsonl", 2, seed, 2, 1e-3, 1e-3),
            prompts_per_step=4,
            generations_per_prompt=2,
            normalize_advantages=normalize_advantages,
        )

    result = train(0)
    assert result["history"] == train(0)["history"]
    assert result["history"] != train(1)["history"]
    assert all(step["policy_grad_norm"] > 0 for step in result["history"])
    assert all(step["critic_grad_norm"] > 0 for step in result["history"])
    assert result["seconds"].keys() == {"sampling", "values", "policy", "critic"}


def test_running_normalizer_centres_on_earlier_steps():
    normalizer = bare_loop.Normalizer("running", decay=0.5)
    assert normalizer.centre_and_scale(torch.tensor([1.0, 3.0])) == pytest.approx((0.0, 5**-0.5))
    assert normalizer.centre_and_scale(torch.tensor([2.0, 6.0])) == pytest.approx((2.0, 8**-0.5))
    # Bias-corrected mean of the steps' means 2 and 4 with weights 1 : 2.
    assert normalizer.centre_and_scale(torch.tensor([0.0]))[0] == pytest.approx(10 / 3)


def test_rate_rises_over_five_steps_then_falls_to_a_fifth():
    rates = [bare_loop.rate_factor(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
