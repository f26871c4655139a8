"""Weights get to a real server, every way that a CPU can, and are the ones it computes with."""

import logging
import re
import time

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport
from lightning_ppo.rollout.vllm.control import Control
from lightning_ppo.rollout.vllm.server_arguments import ServerCommand
from lightning_ppo.rollout.vllm.weight_update import WeightUpdate

LARGE = 1 << 30
TRANSPORTS = ["shared_memory", "file", "gloo"]


@pytest.fixture
def make_update(transfer_folder):
    """Build updates: `make_update("gloo", bucket_bytes=1000)`."""
    made = []

    def build(kind, bucket_bytes=50_000, clear_cache=True):
        transport = {
            "shared_memory": SharedMemoryTransport,
            "file": lambda: FileTransport(transfer_folder),
            "gloo": lambda: GroupTransport("gloo", "127.0.0.1", 20.0),
        }[kind]()
        made.append(WeightUpdate(transport, torch.float32, bucket_bytes, 30.0, clear_cache=clear_cache))
        return made[-1]

    yield build
    for update in made:
        update.close()


def scattered(weights):
    """The same values behind other strides: every second column of a wider tensor."""
    for name, tensor in weights:
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        view = wide[..., ::2]
        assert tensor.numel() < 2 or not view.is_contiguous()
        yield name, view


def check(url, policy, requests, sample, score, greedy, version):
    """Greedy tokens are those of transformers, sampled log-probs are those of the trainer."""
    for request, answer in zip(requests("greedy"), sample(url, requests("greedy")), strict=True):
        assert answer.token_ids == greedy(policy, request)
        assert set(answer.policy_versions) == {version}
    sampled = requests("sampled")
    answers = sample(url, sampled)
    errors = [
        (score(policy, r, a) - torch.tensor(a.logprobs)).abs().max() for r, a in zip(sampled, answers, strict=True)
    ]
    assert max(errors) < 1e-4


@pytest.fixture
def requests(make_requests):
    return lambda kind: make_requests(4, 16, temperature=0.0 if kind == "greedy" else 1.0)


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [1, 9_999, LARGE])
def test_server_computes_with_what_was_sent(
    kind, bucket_bytes, make_update, url, make_policy, requests, sample, score, greedy
):
    control, update = Control(url), make_update(kind, bucket_bytes)
    for seed in (11, 12):
        policy = make_policy(seed)
        assert update.update([control], policy.state_dict().items(), seed) == {}
        check(url, policy, requests, sample, score, greedy, seed)
    assert control.version(5) == "12"
    assert not control.is_paused(5)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_strides_and_precision_of_the_source_do_not_matter(
    kind, make_update, url, make_policy, requests, sample, score, greedy
):
    control, update = Control(url), make_update(kind)
    policy = make_policy(21)
    assert update.update([control], scattered(policy.state_dict().items()), 21) == {}
    check(url, policy, requests, sample, score, greedy, 21)
    # the policy itself stays in float32, else transformers rounds its rotary frequencies too
    rounded = {name: tensor.bfloat16() for name, tensor in make_policy(22).state_dict().items()}
    assert update.update([control], rounded.items(), 22) == {}
    policy.load_state_dict({name: tensor.float() for name, tensor in rounded.items()})
    check(url, policy, requests, sample, score, greedy, 22)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_tied_embeddings(kind, tied_engine, make_update, make_policy, requests, sample, score, greedy):
    (member,) = tied_engine.fleet.serving()
    update = make_update(kind)
    for seed in (31, 32):
        policy = make_policy(seed, tied=True)
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
        assert update.update([member.control], policy.state_dict().items(), seed) == {}
        check(member.url, policy, requests, sample, score, greedy, seed)


@pytest.fixture(scope="module")
def tied_engine(start_engine):
    return start_engine(tied=True)


@pytest.mark.slow
def test_one_name_of_tied_tensors_is_enough_and_buffers_do_no_harm(
    tied_engine, make_update, make_policy, requests, sample, score, greedy
):
    (member,) = tied_engine.fleet.serving()
    policy = make_policy(33, tied=True)
    weights = [pair for pair in policy.state_dict().items() if pair[0] != "lm_head.weight"]
    # a persistent buffer of older checkpoints, which vLLM computes itself
    weights.append(("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16)))
    assert make_update("shared_memory").update([member.control], weights, 33) == {}
    check(member.url, policy, requests, sample, score, greedy, 33)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["both", "one"])
def test_tied_tensors_stay_tied_after_an_update_that_failed(
    names, tied_engine, make_update, make_policy, requests, sample, score, greedy
):
    """vLLM has made two tensors of them by then."""
    (member,) = tied_engine.fleet.serving()

    def weights(policy):
        return [pair for pair in policy.state_dict().items() if names == "both" or pair[0] != "lm_head.weight"]

    half = weights(make_policy(34, tied=True))[:5]
    (error,) = make_update("shared_memory").update([member.control], half, 34).values()
    assert "is missing in the update" in str(error)
    update = make_update("shared_memory")
    for version in (35, 36):
        policy = make_policy(version, tied=True)
        assert update.update([member.control], weights(policy), version) == {}
        check(member.url, policy, requests, sample, score, greedy, version)


@pytest.fixture(
    scope="module", params=[("plain", False), ("plain", True), ("packed", False), ("packed", True)], ids=str
)
def server_in_place(request, start_engine):
    """Kind of the policy, and a server that loads weights where they are."""
    cpu_weights, tied = request.param
    kind = {"tied": tied, "large": cpu_weights == "packed"}
    engine = start_engine(**kind, cpu_weights=cpu_weights)
    yield kind, engine.fleet.serving()[0]
    engine.close()


@pytest.mark.slow
def test_weights_that_are_loaded_in_place(server_in_place, make_update, make_policy, requests, sample, score, greedy):
    kind, member = server_in_place
    update = make_update("shared_memory")
    for version in (71, 72):
        policy = make_policy(version, **kind)
        assert update.update([member.control], policy.state_dict().items(), version) == {}
        check(member.url, policy, requests, sample, score, greedy, version)
    for gone, reason in {
        "model.layers.1.self_attn.k_proj.weight": "weights got",
        "model.norm.weight": "weights=model.norm.weight is missing",
        "model.embed_tokens.weight": "weights=model.embed_tokens.weight is missing",
    }.items():
        # the head of a tied model is its embedding
        names = {gone, "lm_head.weight"} if kind["tied"] and "embed" in gone else {gone}
        weights = [pair for pair in policy.state_dict().items() if pair[0] not in names]
        (error,) = make_update("shared_memory").update([member.control], weights, 73).values()
        assert reason in str(error)
    assert update.update([member.control], policy.state_dict().items(), 74) == {}
    check(member.url, policy, requests, sample, score, greedy, 74)


@pytest.mark.slow
def test_experts(start_engine, make_update, make_policy, requests, sample, score, greedy):
    """One layer with experts, one without. vLLM 0.32 on a CPU would compute with experts that it forgot to pack."""
    engine = start_engine(experts=True, cpu_weights="packed")
    (member,) = engine.fleet.serving()
    update = make_update("shared_memory")
    for version in (81, 82):
        policy = make_policy(version, experts=True)
        assert update.update([member.control], policy.state_dict().items(), version) == {}
        check(member.url, policy, requests, sample, score, greedy, version)
    # as in a folder of Hugging Face: every expert's tensors by themselves
    single = revert_weight_conversion(policy, policy.state_dict())
    assert len(single) > len(policy.state_dict())
    gone = "model.layers.0.mlp.experts.2.up_proj.weight"
    weights = [pair for pair in single.items() if pair[0] != gone]
    assert len(weights) == len(single) - 1
    (error,) = make_update("shared_memory").update([member.control], weights, 83).values()
    assert re.search(r"weights=model\.layers\.0\.mlp\.experts\S* got \d+ of \d+ values", str(error))
    assert make_update("shared_memory").update([member.control], single.items(), 84) == {}
    check(member.url, policy, requests, sample, score, greedy, 84)
    engine.close()


@pytest.mark.slow
def test_greedy_output_equals_a_fresh_server_on_the_exported_folder(
    url, make_update, make_policy, make_spec, make_requests, sample, tmp_path
):
    from lightning_ppo.rollout.vllm.config import VLLMConfig
    from lightning_ppo.rollout.vllm.launch import SubprocessLauncher

    policy = make_policy(41)
    assert make_update("shared_memory").update([Control(url)], policy.state_dict().items(), 41) == {}
    ours = [answer.token_ids for answer in sample(url, make_requests(8, temperature=0.0))]
    policy.save_pretrained(tmp_path / "exported")
    loads = ("--load-format", "auto", "--model", str(tmp_path / "exported"))
    config = VLLMConfig(device="cpu", kv_cache_bytes=64 * 1024 * 1024, extra_arguments=loads)
    command = ServerCommand(config, policy.config.to_json_string(), 384)
    launcher = SubprocessLauncher(config, command, tmp_path)
    try:
        server = launcher.launch(0)
        control = Control(server.url)
        deadline = time.monotonic() + 240
        while True:
            try:
                control.health(2.0)
                break
            except EngineError:
                assert server.is_alive(), server.describe_end()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        control.set_version(0, 10.0)
        fresh = [answer.token_ids for answer in sample(server.url, make_requests(8, temperature=0.0))]
    finally:
        launcher.close()
    assert fresh == ours


def broken(policy, name, change):
    return [(n, change(t) if n == name else t) for n, t in policy.state_dict().items()]


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.weight", lambda t: t[:32], "q_proj.weight cannot be loaded"),
        ("model.norm.weight", lambda t: t[:32], "model.norm.weight cannot be loaded"),
        ("model.embed_tokens.weight", lambda t: t[:80], "embed_tokens.weight cannot be loaded"),
    ],
)
def test_a_wrong_shape_is_named_and_can_be_put_right(
    kind, name, change, reason, make_update, url, make_policy, requests, sample, score, greedy
):
    control = Control(url)
    (error,) = make_update(kind).update([control], broken(make_policy(51), name, change), 51).values()
    assert isinstance(error, EngineError)
    assert reason in str(error)
    assert url in str(error)
    assert "\n" not in str(error)
    # half an update is no policy: the server waits for a whole one
    assert control.is_paused(5)
    policy = make_policy(52)
    assert make_update(kind).update([control], policy.state_dict().items(), 52) == {}
    check(url, policy, requests, sample, score, greedy, 52)


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("lm_head.weight", "weights=lm_head.weight is missing"),
        ("model.layers.1.self_attn.k_proj.weight", "weights=model.layers.1.self_attn.qkv_proj got"),
        ("model.layers.0.mlp.up_proj.weight", "weights=model.layers.0.mlp.gate_up_proj got"),
        ("model.layers.1.input_layernorm.weight", "weights=model.layers.1.input_layernorm.weight is missing"),
    ],
)
def test_a_missing_tensor_is_noticed(gone, reason, make_update, url, make_policy, requests, sample, score, greedy):
    """vLLM itself goes on with the old values."""
    control = Control(url)
    weights = [pair for pair in make_policy(61).state_dict().items() if pair[0] != gone]
    (error,) = make_update("shared_memory").update([control], weights, 61).values()
    assert reason in str(error)
    policy = make_policy(62)
    assert make_update("shared_memory").update([control], policy.state_dict().items(), 62) == {}
    check(url, policy, requests, sample, score, greedy, 62)


def test_an_unknown_tensor_is_refused(make_update, url, make_policy, engine):
    weights = [*make_policy(63).state_dict().items(), ("value_head.weight", torch.ones(3))]
    (error,) = make_update("shared_memory").update([Control(url)], weights, 63).values()
    assert "value_head.weight" in str(error)
    assert make_update("shared_memory").update([Control(url)], make_policy(0).state_dict().items(), 64) == {}


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_an_export_that_breaks_off_leaves_the_server_held_and_recoverable(
    kind, make_update, url, make_policy, requests, sample, score, greedy
):
    control, update = Control(url), make_update(kind, bucket_bytes=1)
    assert update.update([control], make_policy(71).state_dict().items(), 71) == {}

    def breaks_off():
        for index, pair in enumerate(make_policy(72).state_dict().items()):
            if index == 5:
                raise ZeroDivisionError
            yield pair

    with pytest.raises(ZeroDivisionError):
        update.update([control], breaks_off(), 72)
    assert update.is_torn
    assert update.version is None
    assert control.is_paused(5)
    with pytest.raises(EngineError, match="the last update was not completed"):
        update.push(control)
    policy = make_policy(73)
    assert update.update([control], policy.state_dict().items(), 73) == {}
    check(url, policy, requests, sample, score, greedy, 73)


def test_an_export_that_fails_before_its_first_bucket_does_not_hold_the_server(make_update, url, make_policy):
    control, update = Control(url), make_update("shared_memory", bucket_bytes=LARGE)
    assert update.update([control], make_policy(74).state_dict().items(), 74) == {}
    with pytest.raises(EngineError, match=r"lm_head.weight is missing"):
        update.update([control], list(make_policy(75).state_dict().items())[:-1], 75)
    assert not update.is_torn
    assert not control.is_paused(5)
    assert control.version(5) == "74"


def test_push_brings_the_current_weights_to_a_server_that_comes_later(
    make_update, url, make_policy, requests, sample, score, greedy
):
    update = make_update("gloo")
    policy = make_policy(81)
    assert update.update([], policy.state_dict().items(), 81) == {}
    update.push(Control(url))
    check(url, policy, requests, sample, score, greedy, 81)


def test_the_number_alone(make_update, url, make_policy, requests, sample, score, greedy):
    update = make_update("shared_memory")
    with pytest.raises(EngineError, match="send the whole state dict once"):
        update.announce([Control(url)], 90)
    policy = make_policy(91)
    assert update.update([Control(url)], policy.state_dict().items(), 91) == {}
    assert update.announce([Control(url)], 92) == {}
    check(url, policy, requests, sample, score, greedy, 92)
    assert update.version == 92


def test_files_and_folders_go(make_update, url, make_policy, transfer_folder):
    update = make_update("file")
    assert update.update([Control(url)], make_policy(95).state_dict().items(), 95) == {}
    assert [path for path in transfer_folder.rglob("*") if path.is_file()] == []
    update.close()
    assert list(transfer_folder.iterdir()) == []


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_stale_prefix_cache_would_be_noticed(
    clear_cache, make_update, url, make_policy, make_requests, sample, score
):
    """The probe shares a long prompt with a response of the old weights."""
    control, update = Control(url), make_update("shared_memory", clear_cache=clear_cache)
    # vLLM caches whole blocks of 128 tokens on a CPU
    (probe,) = make_requests(1, 8, prompt_length=300, stop_token_ids=())
    assert update.update([control], make_policy(101).state_dict().items(), 101) == {}
    sample(url, [probe])
    policy = make_policy(102)
    assert update.update([control], policy.state_dict().items(), 102) == {}
    (answer,) = sample(url, [probe])
    error = (score(policy, probe, answer) - torch.tensor(answer.logprobs)).abs().max()
    # the next tests get a server without a stale cache
    control.pause(10.0, clear_cache=True)
    control.resume(10.0)
    assert (error < 1e-4) == clear_cache
    assert clear_cache or error > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_response_that_spans_an_update_carries_both_versions(
    temperature, make_update, url, make_policy, make_requests, sample, score, caplog
):
    import threading

    caplog.set_level(logging.WARNING)
    control, update = Control(url), make_update("shared_memory")
    policies = {111: make_policy(111), 112: make_policy(112)}
    requests = make_requests(4, 340, temperature=temperature, stop_token_ids=())
    assert update.update([control], policies[111].state_dict().items(), 111) == {}
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(sample(url, requests)))
    thread.start()
    time.sleep(0.25)
    assert update.update([control], policies[112].state_dict().items(), 112) == {}
    thread.join(60)
    assert len(answers) == 4
    assert {version for answer in answers for version in answer.policy_versions} == {111, 112}
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == 340
        assert answer.policy_versions == tuple(sorted(answer.policy_versions))
        versions = torch.tensor(answer.policy_versions)
        served = torch.tensor(answer.logprobs)
        for version, policy in policies.items():
            mine = versions == version
            errors = (score(policy, request, answer) - served).abs()
            assert errors[mine].max() < 1e-4
            # the span is exact: the token before and the one behind it are not this policy's
            assert mine.all() or errors[~mine].max() > 0.1
