"""What runs inside of vLLM, without vLLM."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.compatibility import check_policy, check_scheduling, expected_policy
from lightning_ppo.refit.completeness import check_complete, tied_names
from lightning_ppo.refit.cuda_handles import decode_handle, encode_handle
from lightning_ppo.refit.vllm_backend import VLLMInternals, make_backend, register

TOO_OLD = r"vLLM is too old for the weight-update interface \(vllm.*is missing\); install vllm==0.32.\*"


@pytest.fixture
def _no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.usefixtures("_no_vllm")
@pytest.mark.parametrize("call", [VLLMInternals.load, make_backend])
def test_a_vllm_without_the_interface(call):
    with pytest.raises(EngineError, match=TOO_OLD):
        call()


@pytest.mark.usefixtures("_no_vllm")
def test_a_plugin_must_not_end_a_vllm_that_does_not_need_it(caplog):
    with caplog.at_level(logging.ERROR):
        register()
    assert "vLLM is too old" in caplog.text


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.qkv = nn.Linear(2, 6)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


NAMES = {"embed.weight", "qkv.weight", "qkv.bias"}


def info(loaded, total):
    return SimpleNamespace(can_load=lambda: total is not None, load_numel=loaded, load_numel_total=total)


def test_tied_tensors_have_a_second_name():
    assert tied_names(Model()) == {"head.weight"}


def test_a_complete_update_passes():
    model = Model()
    # an embedding is padded, and waits for ever
    infos = {model.embed: info(4, 128)}
    check_complete(model, NAMES, lambda layer: infos.get(layer, info(0, None)), (nn.Linear,))


def test_a_parameter_that_got_nothing():
    with pytest.raises(EngineError, match=r"weights=qkv.bias is missing"):
        check_complete(Model(), NAMES - {"qkv.bias"}, lambda layer: info(0, None), (nn.Linear,))


def test_a_parameter_that_got_a_part():
    model = Model()
    infos = {model.qkv: info(10, 18)}
    with pytest.raises(EngineError, match="weights=qkv got 10 of 18 values"):
        check_complete(model, NAMES, lambda layer: infos.get(layer, info(0, None)), (nn.Linear,))


def test_buffers_need_not_come():
    model = Model()
    model.qkv.register_buffer("map", torch.zeros(5))
    check_complete(model, NAMES, lambda layer: {model.qkv: info(18, 23)}.get(layer, info(0, None)), (nn.Linear,))
    with pytest.raises(EngineError, match="weights=qkv got 17 of 18 values"):
        check_complete(model, NAMES, lambda layer: {model.qkv: info(17, 23)}.get(layer, info(0, None)), (nn.Linear,))


def served(**changes):
    model = {"dtype": torch.float32, "logprobs_mode": "processed_logprobs", "max_model_len": 64, "quantization": None}
    return SimpleNamespace(**{**model, **changes})


def test_policies_are_compared():
    expected = expected_policy(
        '{"vocab_size": 9, "hidden_size": 4, "head_dim": null, "bos_token_id": 3}', "float32", 64
    )
    assert expected == {"config": {"vocab_size": 9, "hidden_size": 4}, "dtype": "float32", "max_context_tokens": 64}
    check_policy(expected, SimpleNamespace(vocab_size=9, hidden_size=4), served())
    # a field that the server's config lacks says nothing
    check_policy(expected, SimpleNamespace(vocab_size=9), served())
    with pytest.raises(EngineError, match="hidden_size=8 is served, but the policy has 4"):
        check_policy(expected, SimpleNamespace(vocab_size=9, hidden_size=8), served())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.bfloat16}, "dtype=bfloat16 is served, but vllm.dtype is float32"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode=raw_logprobs leaves the temperature out"),
        ({"quantization": "fp8"}, r"quantization=fp8 is served, [^\n]*; start vLLM without --quantization"),
        ({"max_model_len": 63}, "max_model_len=63 is shorter than the 64 tokens"),
    ],
)
def test_servers_that_do_not_fit(changes, reason):
    with pytest.raises(EngineError, match=reason):
        check_policy(expected_policy("{}", "float32", 64), SimpleNamespace(), served(**changes))


FIELDS = (0, b"handle", 1024, 256, b"counter", 3, b"event", True)


def test_a_server_that_answers_probes_in_turn_is_refused():
    check_scheduling("priority")
    with pytest.raises(
        EngineError, match=r"^scheduling_policy=fcfs [^\n]*; start vLLM with --scheduling-policy priority$"
    ):
        check_scheduling("fcfs")


def test_handles_travel_as_plain_values():
    message = encode_handle(FIELDS)
    assert all(isinstance(value, (int, str)) for value in message)
    assert decode_handle(message, 2) == (2, *FIELDS[1:])


@pytest.mark.parametrize("fields", [FIELDS[:-1], (0, 1, *FIELDS[2:])])
def test_handles_of_another_torch(fields):
    with pytest.raises(EngineError, match="does not know torch"):
        encode_handle(fields)


@pytest.mark.parametrize("message", [encode_handle(FIELDS)[:-1], ["x"] * 8, [None] * 8])
def test_handles_that_cannot_be_read(message):
    with pytest.raises(EngineError, match="both sides need the same version"):
        decode_handle(message, 0)
