"""One real vLLM server for all tests of this folder, a tiny policy for it, and servers that only pretend."""

import asyncio
import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from lightning_ppo.rollout.engine import Generation, GenerationRequest, PolicySpec, SamplingParams
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.engine import VLLMEngine
from lightning_ppo.rollout.vllm.generation import GenerationClient

CONTEXT = 384
SETTINGS = {"device": "cpu", "update_timeout_s": 60.0, "start_timeout_s": 240.0, "kv_cache_bytes": 64 * 1024 * 1024}


def policy_config(*, tied: bool = False, large: bool = False, experts: bool = False) -> PretrainedConfig:
    """A two-layer Llama with a head size that vLLM takes on a CPU, and a vocabulary that is no multiple of 64.

    A large one has matrices of more than 1 MiB among small ones, its head among the former. With experts it is a Qwen3.
    """
    kind, others = LlamaConfig, {}
    if experts:
        kind = Qwen3MoeConfig
        others = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [1]}
    config = kind(
        vocab_size=4200 if large else 90,
        hidden_size=64,
        intermediate_size=4200 if large else 96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **others,
    )
    config.architectures = ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"]
    return config


def spec_of(config: PretrainedConfig, context: int = CONTEXT) -> PolicySpec:
    """What an engine learns of a policy."""
    return PolicySpec(config.to_json_string(use_diff=False), context)


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., PreTrainedModel]:
    """Build a random policy: `make_policy(seed, tied=False, large=False, experts=False)`."""

    def build(seed: int, **kind: bool) -> PreTrainedModel:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(policy_config(**kind)).eval()

    return build


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., PolicySpec]:
    """Build the spec of `make_policy`'s policies, perhaps with other fields: `make_spec(vocab_size=91)`."""

    def build(*, tied: bool = False, context: int = CONTEXT, **changes: Any) -> PolicySpec:
        config = policy_config(tied=tied)
        for name, value in changes.items():
            setattr(config, name, value)
        return spec_of(config, context)

    return build


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VLLMEngine]]:
    """Start an engine with servers of its own, which end with the session: `start_engine(tied=True, **settings)`.

    They load weights as servers on GPUs do, unless `cpu_weights` says something else.
    """
    engines: list[VLLMEngine] = []

    def start(*, tied: bool = False, large: bool = False, experts: bool = False, **settings: Any) -> VLLMEngine:
        config = VLLMConfig(**{"cpu_weights": "vllm", **SETTINGS, **settings})
        engine = VLLMEngine(config, tmp_path_factory.mktemp("logs"))
        engines.append(engine)
        engine.start(spec_of(policy_config(tied=tied, large=large, experts=experts)))
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def engine(start_engine: Callable[..., VLLMEngine], make_policy: Callable[..., PreTrainedModel]) -> VLLMEngine:
    """The engine whose one server most tests share; it has weights, and prefills 64 tokens at a time."""
    started = start_engine(bucket_bytes=50_000, extra_arguments=("--max-num-batched-tokens", "64"))
    started.update_weights(make_policy(0).state_dict().items(), 1)
    return started


@pytest.fixture
def url(engine: VLLMEngine) -> str:
    """Address of the shared server."""
    (member,) = engine.fleet.serving()
    return member.url


@pytest.fixture(scope="session")
def sample() -> Callable[..., list[Generation]]:
    """Sample from a server: `sample(url, requests)`."""

    def run(url: str, requests: list[GenerationRequest]) -> list[Generation]:
        async def ask_all() -> list[Generation]:
            client = GenerationClient(60.0)
            try:
                jobs = (
                    client.generate("shared", url, request, f"t-{time.monotonic_ns()}-{request.request_id}")
                    for request in requests
                )
                return await asyncio.gather(*jobs)
            finally:
                client.close()
                await asyncio.sleep(0)

        return asyncio.run(ask_all())

    return run


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[GenerationRequest]]:
    """Build requests with different prompts and seeds: `make_requests(8, temperature=0.6)`."""

    def build(count: int = 8, max_tokens: int = 24, prompt_length: int = 3, **sampling: Any) -> list[GenerationRequest]:
        params = SamplingParams(max_tokens, **{"stop_token_ids": (1,), **sampling})
        return [
            GenerationRequest(f"r{i}", tuple(2 + (7 * i + 3 * j) % 80 for j in range(prompt_length)), params, 100 + i)
            for i in range(count)
        ]

    return build


@pytest.fixture(scope="session")
def score() -> Callable[..., torch.Tensor]:
    """The trainer's log-probs of a response, `[T]` float32: `score(policy, request, generation)`."""

    def run(policy: PreTrainedModel, request: GenerationRequest, generation: Generation) -> torch.Tensor:
        ids = torch.tensor([[*request.prompt_ids, *generation.token_ids]])
        start = len(request.prompt_ids)
        with torch.no_grad():
            logits = policy(ids).logits[0, start - 1 : -1].float()
        logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
        return logprobs.gather(1, ids[0, start:, None])[:, 0]

    return run


@pytest.fixture(scope="session")
def greedy() -> Callable[..., tuple[int, ...]]:
    """The greedy response of a policy in transformers: `greedy(policy, request)`."""

    def run(policy: PreTrainedModel, request: GenerationRequest) -> tuple[int, ...]:
        ids = list(request.prompt_ids)
        for _ in range(request.sampling.max_tokens):
            with torch.no_grad():
                token = int(policy(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            if token in request.sampling.stop_token_ids:
                break
        return tuple(ids[len(request.prompt_ids) :])

    return run


Answer = tuple[int, Any]


class Cut(bytes):
    """A body of which only the first half is sent before the connection breaks."""


class FakeServer:
    """Answers like a vLLM server, in a thread of this process.

    Attributes:
        url: Its address.
        answers: Status and body by path; a function of the request's body in the place of the pair is called.
        calls: Paths (with query) that were asked for, with their bodies, in order.
        key: The API key that it wants where vLLM does.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, Any]] = []
        self.version = "default"
        self.key: str | None = None
        self.closing = threading.Event()
        self.answers: dict[str, Answer | Callable[[Any], Answer | None]] = {
            "/health": (200, None),
            "/version": (200, {"version": "0.32.0"}),
            "/is_sleeping": (200, {"is_sleeping": False}),
            "/get_world_size": (200, {"world_size": 1}),
            "/inference/v1/generate": self.generate,
            "/finish_weight_update": lambda body: self.serve(body["weight_version"]),
            "/update_weight_version": lambda body: self.serve(body["new_version"]),
        }
        for path in ("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"):
            self.answers[path] = (200, {})
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                fake.calls.append((self.path, body))
                found = fake.answers.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
                answer = found(body) if callable(found) else found
                if fake.key and self.path.startswith("/inference"):
                    answer = (
                        answer
                        if self.headers["Authorization"] == f"Bearer {fake.key}"
                        else (401, {"error": "Unauthorized"})
                    )
                if answer is None:
                    # closed without an answer
                    self.close_connection = True
                    return
                status, content = answer
                data = (
                    b"" if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
                )
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2] if isinstance(data, Cut) else data)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def serve(self, version: str) -> Answer:
        """Carry this version from now on."""
        self.version = version
        return 200, {}

    def generate(self, body: Any) -> Answer:
        """Three tokens, of the version that is served."""
        if not body:
            return 400, {"error": {"message": "Field required"}}
        return 200, self.response([5, 6, 1])

    def response(self, tokens: list[int], **changes: Any) -> dict[str, Any]:
        """Body of a complete answer, with other fields."""
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        return {"request_id": "x", "choices": [{**choice, **changes}]}

    def hang(self, body: Any) -> Answer | None:
        """Answer nothing until the test is over."""
        self.closing.wait(30)
        return None

    def cut(self, data: bytes) -> bytes:
        """A body that breaks off."""
        return Cut(data)

    def paths(self) -> list[str]:
        """What was asked for, without queries and health."""
        return [path.partition("?")[0] for path, _ in self.calls if path != "/health"]

    def close(self) -> None:
        """Stop answering; may be called twice."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """Start a fake server: `fake_server()`."""
    servers: list[FakeServer] = []

    def start() -> FakeServer:
        server = FakeServer(f"fake{len(servers)}")
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def transfer_folder(tmp_path: Path) -> Path:
    """Folder of the file transport."""
    return tmp_path / "transfer"


@contextlib.contextmanager
def many_files(count: int | None = None) -> Iterator[None]:
    """Have `count` more files open; None: as many as this process may, with a low limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    limit = held[0] + (20 if count is None else count + 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while count is None or len(held) < count:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def open_files() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Have many files open, or all: `with open_files(1100)`, `with open_files()`."""
    return many_files
