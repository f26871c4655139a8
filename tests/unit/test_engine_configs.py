"""Settings of vLLM, Ray and failures check themselves; the data module's check which engine they are for."""

import dataclasses
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import lightning_ppo as ppo
from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.assembly import build_engine

VLLM = [
    # a text is a sequence of its letters
    ("urls", "http://a:1"),
    ("urls", (1,)),
    ("urls", None),
    ("extra_arguments", "--swap-space 4"),
    ("extra_arguments", ("--port", 8000)),
    ("devices", "01"),
    ("devices", 0),
    ("devices", (1.0,)),
    ("devices", (True,)),
    ("cores", 3),
    ("trainer_cores", "0-3"),
    ("environment", {"OMP_NUM_THREADS": 1}),
    ("environment", "A=1"),
    ("urls", ("10.0.0.5:8000",)),
    ("urls", ("http://a:1", "http://a:1/")),
    ("urls", ("ftp://h:80",)),
    ("urls", ("http://",)),
    ("urls", ("http://:8000",)),
    ("urls", ("http://h:99999",)),
    ("urls", ("http://h:abc",)),
    ("urls", ("http://[::1:80",)),
    ("num_servers", 0),
    ("placement", "slurm"),
    ("device", "tpu"),
    ("devices_per_server", 0),
    ("devices", (0, 1)),
    ("devices", (-1,)),
    ("cores", (1, 1)),
    ("trainer_threads", 0),
    ("num_threads", 0),
    ("dtype", "int8"),
    ("cpu_weights", "sparse"),
    # the device is `auto`
    ("cpu_weights", "plain"),
    ("max_num_seqs", 0),
    ("kv_cache_bytes", 0),
    ("gpu_memory_fraction", 0),
    ("gpu_memory_fraction", 1.1),
    ("transport", "http"),
    ("transport", "file"),
    ("bucket_bytes", 0),
    ("start_timeout_s", 0),
    ("update_timeout_s", float("inf")),
    ("request_timeout_s", 0),
    ("fingerprint_tolerance", 0),
    ("probe_interval_s", 0),
    ("probe_timeout_s", 0),
    ("quarantine_after", 0),
    ("trust_after", 0),
    ("max_restarts", -1),
]
RAY = [
    ("num_cpus_per_server", -1),
    ("num_gpus_per_server", -1),
    ("resources_per_server", {"rack": 0}),
    ("resources_per_server", "rack"),
    ("placement_strategy", "NEAR"),
    ("num_cpus_per_reward_worker", -1),
    ("local_object_store_bytes", 1000),
]
FAILURES = [
    ("max_infra_attempts", 0),
    ("max_data_attempts", 0),
    ("backoff_s", -1),
    ("backoff_s", 31),
    ("max_backoff_s", -1),
    ("drop", "ignore"),
    ("drop", "skip"),
    ("max_dropped_prompts", 1),
    ("max_consecutive_dropped_prompts", 1),
    ("stall_action", "restart"),
]
KINDS = {"vllm": (ppo.VLLMConfig, VLLM), "ray": (ppo.RayConfig, RAY), "failures": (ppo.FailureConfig, FAILURES)}


@pytest.mark.parametrize(
    ("prefix", "field", "value"), [(prefix, *case) for prefix, (_, cases) in KINDS.items() for case in cases]
)
def test_bad_value_is_rejected_in_one_line_that_names_the_field(prefix, field, value):
    with pytest.raises(ConfigError) as caught:
        KINDS[prefix][0](**{field: value})
    assert re.match(rf"^{prefix}\.{field}(\.\w+)?=[^\n]+; [^\n]+$", str(caught.value)), str(caught.value)


CHOICES = [
    (kind, name, get_args(hint))
    for kind in (ppo.PPOConfig, ppo.RolloutConfig, ppo.LocalEngineConfig, *(kind for kind, _ in KINDS.values()))
    for name, hint in get_type_hints(kind).items()
    if get_origin(hint) is Literal
]


@pytest.mark.parametrize(("kind", "name", "allowed"), CHOICES)
def test_every_choice_is_checked(kind, name, allowed):
    message = rf"^(\w+\.)?{name}=nothing is unknown; choose one of {', '.join(allowed)}$"
    with pytest.raises(ConfigError, match=message):
        kind(**{name: "nothing"})


def test_there_are_choices():
    assert len(CHOICES) > 15


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS.values()])
def test_defaults_are_valid_frozen_and_documented(kind):
    config = kind()
    names = [field.name for field in dataclasses.fields(kind)]
    assert re.findall(r"^ {8}(\w+): ", kind.__doc__, flags=re.MULTILINE) == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, names[0], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "tpu"}, "engine=tpu is unknown"),
        ({"vllm": ppo.VLLMConfig(num_servers=2)}, r"vllm=.* is not read by engine=local; set engine=vllm"),
        ({"engine": "vllm", "local": ppo.LocalEngineConfig(slots=4)}, r"local=.* is not read by engine=vllm"),
    ],
)
def test_settings_of_the_engine_that_is_not_used_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ppo.RolloutDataModule([{"prompt": "^a="}], lambda response: 0.0, **settings)


def test_a_slash_at_the_end_of_an_address_goes():
    config = ppo.VLLMConfig(urls=("http://a:1/", "https://[::1]:2/behind/proxy//", "http://b"))
    assert config.urls == ("http://a:1", "https://[::1]:2/behind/proxy", "http://b")


def test_a_text_in_the_place_of_a_list_says_so():
    message = r"^vllm\.urls='http://a:1' is no list of str; set a list or tuple, with \[\] around one$"
    with pytest.raises(ConfigError, match=message):
        ppo.VLLMConfig(urls="http://a:1")
    assert ppo.VLLMConfig(urls=["http://a:1"], devices=[0], environment={"A": "1"}).urls == ("http://a:1",)


def test_servers_of_the_user_are_not_placed():
    with pytest.raises(ConfigError, match=r"vllm\.placement=ray cannot place the servers of vllm\.urls"):
        ppo.VLLMConfig(urls=("http://a:1",), placement="ray")
    with pytest.raises(ConfigError, match=r"vllm\.num_servers=3 is not the 2 of vllm\.urls"):
        ppo.VLLMConfig(urls=("http://a:1", "http://b:1"), num_servers=3)
    assert ppo.VLLMConfig(urls=("http://a:1", "http://b:1")).is_external
    for others in (
        {"device": "cuda"},
        {"device": "cpu", "devices_per_server": 2},
        {"device": "cpu", "urls": ("http://a",)},
    ):
        with pytest.raises(ConfigError, match=r"vllm\.cpu_weights=plain is for servers on one CPU"):
            ppo.VLLMConfig(cpu_weights="plain", **others)
    assert ppo.VLLMConfig(cpu_weights="plain", device="cpu").cpu_weights == "plain"


@pytest.mark.parametrize(
    ("count", "device", "message"),
    [
        (0, "cuda", "local.device=cuda is not among the 0 GPUs that this process sees; set cpu"),
        (0, "cuda:0", "local.device=cuda:0 is not among the 0 GPUs that this process sees; set cpu"),
        (
            2,
            "cuda:2",
            "local.device=cuda:2 is not among the 2 GPUs that this process sees; set cpu or a lower number than 2",
        ),
        (2, "cuda:1", None),
        (2, "cuda", None),
        (0, "cpu", None),
    ],
)
def test_a_gpu_that_is_not_there_is_found_when_the_engine_is_built(monkeypatch, count, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    settings = ppo.LocalEngineConfig(device=device)
    if message is None:
        assert build_engine(settings, ppo.RolloutConfig(), None, None, print).restarts == 0
        return
    with pytest.raises(ConfigError) as caught:
        build_engine(settings, ppo.RolloutConfig(), None, None, print)
    assert str(caught.value) == message
