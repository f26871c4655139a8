"""The built-in engine's inside, and the host copy that other engines are sent, on a GPU."""

import itertools

import pytest
import torch
from fake_gpu import GPU
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.rollout.engine import GenerationRequest, SamplingParams
from lightning_ppo.rollout.local.decoder import NativeDecoder
from lightning_ppo.rollout.local.fallback import BatchScheduler
from lightning_ppo.rollout.local.protocol import Submit
from lightning_ppo.rollout.local.rows import RowTable
from lightning_ppo.rollout.local.scheduler import SlotScheduler
from lightning_ppo.rollout.local.skeleton import Skeleton

CONTEXT, SLOTS = 48, 4
SAMPLING = (
    SamplingParams(12, temperature=0.0),
    SamplingParams(12, stop_token_ids=(4,)),
    SamplingParams(12, temperature=0.7, top_k=5, top_p=0.9),
)
REQUESTS = [
    GenerationRequest(f"r{i}", prompt, SAMPLING[i % 3], seed=i)
    for i, prompt in enumerate([(5, 9, 3), (1,), tuple(range(20)), (5, 9, 3), (7, 7), (2, 28, 0), tuple(range(9))])
]


def make_policy(kind):
    torch.manual_seed(0)
    if kind == "native":
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen3Config(vocab_size=29, max_position_embeddings=64, initializer_range=0.3, **sizes, **heads)
        return Qwen3ForCausalLM(config).eval()
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=3, n_positions=64, bos_token_id=0, eos_token_id=0)
    ).eval()


def generate(kind, weights, config_json, device):
    """Tokens and log-probs of every request, through weights that are on the host."""
    skeleton = Skeleton.of(config_json)
    rows = RowTable(SLOTS, CONTEXT, skeleton.vocab_size)
    if kind == "native":
        scheduler = SlotScheduler(NativeDecoder(skeleton, SLOTS, CONTEXT, device, torch.float32, 1), rows)
    else:
        scheduler = BatchScheduler(skeleton, rows, device, torch.float32)
    scheduler.load(skeleton.canonical(weights))
    for key, request in enumerate(REQUESTS):
        scheduler.submit(Submit(key, request))
    found = {}
    for step in range(200):
        finished = scheduler.step(step)
        if finished is not None:
            ends = itertools.accumulate(finished.lengths)
            for key, end, length in zip(finished.keys, ends, finished.lengths, strict=True):
                found[key] = finished.token_ids[end - length : end], finished.logprobs[end - length : end]
        if len(found) == len(REQUESTS):
            return found
    raise AssertionError("the scheduler never finished")


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_it_generates_there_what_it_generates_on_the_host(gpu, kind):
    policy = make_policy(kind)
    arguments = policy.state_dict(), policy.config.to_json_string(use_diff=False)
    expected = generate(kind, *arguments, torch.device("cpu"))
    found = generate(kind, *arguments, GPU)
    for key, (tokens, logprobs) in expected.items():
        assert tokens.tolist() == found[key][0].tolist()
        assert abs(logprobs - found[key][1]).max() < 1e-4


def test_weights_on_a_gpu_reach_the_host_copy(gpu):
    policy = make_policy("native")
    there = {name: tensor.to(GPU) for name, tensor in policy.state_dict().items()}
    there["strided"] = torch.arange(12.0).view(3, 4).to(GPU).t()
    host = HostWeights.of(list(there.items()), torch.float32, 2048)
    try:
        for version in range(2):
            sent = {}
            for bucket in host.fill(there.items(), version):
                sent |= {name: tensor.clone() for name, tensor in host.tensors(bucket).items()}
            assert sent.keys() == there.keys()
            for name, tensor in sent.items():
                assert tensor.device.type == "cpu"
                assert torch.equal(tensor, there[name].cpu())
            there = {name: tensor + 1 for name, tensor in there.items()}
    finally:
        host.close()
