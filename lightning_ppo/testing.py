"""Test doubles and small builders, for this package's tests and for those of its users."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ppo.batch import Prompt, PromptGroup, Trajectory
from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest, PolicySpec

CHARACTERS = "#$^=|!abcdefghijklmnopqrstuvwxyz0123456789"
"""Vocabulary of `char_tokenizer`, in order of token id; `#` pads, `$` ends a response."""


def char_tokenizer(chat_template: str | None = None) -> Any:
    """Build a Hugging Face tokenizer with one token per character of `CHARACTERS`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({char: index for index, char in enumerate(CHARACTERS)}, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return build(tokenizer_object=tokenizer, pad_token="#", eos_token="$", chat_template=chat_template)


def make_prompt(row: int = 0, token_ids: Sequence[int] = (2, 6, 3), **columns: Any) -> Prompt:
    """Build a prompt of `char_tokenizer`'s tokens."""
    text = "".join(CHARACTERS[token] for token in token_ids)
    return Prompt(row=row, text=text, token_ids=tuple(token_ids), columns=columns)


def make_trajectory(
    sample_id: str = "draw0_g0",
    prompt_ids: Sequence[int] = (2, 6, 3),
    response_ids: Sequence[int] = (6, 7, 1),
    *,
    reward: float = 0.0,
    version: int = 0,
    truncated: bool = False,
) -> Trajectory:
    """Build a trajectory: every response token is generated, log-prob -1 each."""
    length = len(response_ids)
    return Trajectory(
        sample_id=sample_id,
        prompt_ids=torch.tensor(prompt_ids, dtype=torch.int64),
        response_ids=torch.tensor(response_ids, dtype=torch.int64),
        response_mask=torch.ones(length, dtype=torch.bool),
        rollout_logprobs=torch.full((length,), -1.0),
        policy_versions=torch.full((length,), version, dtype=torch.int64),
        reward=reward,
        finish_reason="length" if truncated else "stop",
        response_text="".join(CHARACTERS[token] for token in response_ids if token > 1),
    )


def make_group(draw: int = 0, *, size: int = 1, version: int = 0, target_step: int | None = None) -> PromptGroup:
    """Build a finished group of `size` equal trajectories."""
    prompt = make_prompt(row=draw)
    return PromptGroup(
        group_id=f"draw{draw}",
        draw=draw,
        prompt=prompt,
        target_step=target_step,
        start_version=version,
        end_version=version,
        trajectories=tuple(make_trajectory(f"draw{draw}_g{index}", version=version) for index in range(size)),
        generation_s=0.0,
    )


class FakeEngine:
    """An engine in this process. Tokens depend on the request's prompt and seed only.

    The last token is a stop token if there is one and the length is below the limit; else the response is truncated.

    Args:
        length: Response tokens of a request (cut at its limit), or a function of it; None draws 1..limit from the seed.
        delay_s: Seconds before the answer, or a function of the request.
        fails: Returns what `generate` raises for a request, or None.
        holds: Requests for which this returns True wait until `let_go`.
        vocabulary: Token ids are below this.
    """

    def __init__(
        self,
        *,
        length: int | Callable[[GenerationRequest], int] | None = None,
        delay_s: float | Callable[[GenerationRequest], float] = 0.0,
        fails: Callable[[GenerationRequest], BaseException | None] = lambda request: None,
        holds: Callable[[GenerationRequest], bool] = lambda request: False,
        vocabulary: int = len(CHARACTERS),
    ) -> None:
        self._length = length
        self._delay_s = delay_s
        self._fails = fails
        self._holds = holds
        self._vocabulary = vocabulary
        self._held: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._death: str | None = None
        self._asleep = self._awaits_weights = False
        self._running: set[str] = set()
        self.spec: PolicySpec | None = None
        self.version = 0
        self.weights: dict[str, Tensor] = {}
        """Copies of the weights of the last update that brought any."""
        self.versions: list[int] = []
        """Versions of all updates, in order."""
        self.requests: list[GenerationRequest] = []
        """All requests, in the order in which they arrived."""
        self.cancelled: list[str] = []
        """Ids of requests that their caller cancelled."""
        self.sleeps: list[bool] = []
        """True for every call of `sleep`, False for every call of `wake`, in order."""
        self.restarts = 0
        """What it claims; see `Engine.restarts`."""
        self.closed = False

    def start(self, spec: PolicySpec) -> None:
        """Remember the spec."""
        self.spec = spec

    async def generate(self, request: GenerationRequest) -> Generation:
        """Answer as scripted.

        Raises:
            EngineError: it is asleep, or has got no weights since it woke up.
            EngineDiedError: after `die`.
        """
        self.requests.append(request)
        start_version = self.version
        if self._asleep or self._awaits_weights:
            todo = "wake" if self._asleep else "update_weights"
            raise EngineError(f"the fake engine cannot serve {request.request_id} yet; call {todo} first")
        self._running.add(request.request_id)
        try:
            self._check_alive()
            failure = self._fails(request)
            if failure is not None:
                raise failure
            if self._holds(request):
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._held[request.request_id] = loop, future
                await future
            delay_s = self._delay_s(request) if callable(self._delay_s) else self._delay_s
            await asyncio.sleep(delay_s)
            self._check_alive()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self._held.pop(request.request_id, None)
            self._running.discard(request.request_id)
        return self._answer(request, start_version)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Keep copies of the weights, on the host; serve `version` from now on."""
        new = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        self.weights = new or self.weights
        self.versions.append(version)
        self.version = version
        self._awaits_weights = False

    async def probe(self, request: GenerationRequest) -> Mapping[str, Generation]:
        """Answer as scripted, as the only replica."""
        return {"fake": await self.generate(request)}

    def sleep(self) -> None:
        """Refuse requests from now on.

        Raises:
            EngineError: a request is in flight.
        """
        if self._running:
            raise EngineError(f"the fake engine still samples {min(self._running)}; wait for it before sleep")
        self.sleeps.append(True)
        self._asleep = True

    def wake(self) -> None:
        """Serve requests again, after the next `update_weights`."""
        self.sleeps.append(False)
        self._awaits_weights = self._awaits_weights or self._asleep
        self._asleep = False

    def check_health(self) -> None:
        """Raise after `die`.

        Raises:
            EngineDiedError: the engine was told to die.
        """
        self._check_alive()

    def describe(self) -> str:
        """Say what it is."""
        return "FakeEngine"

    def close(self) -> None:
        """Remember that it was called."""
        self.closed = True

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of the requests that wait for `let_go`."""
        return tuple(self._held)

    def let_go(self, request_id: str | None = None) -> None:
        """Answer one held request, or all; from any thread. They no longer count as held when this returns.

        Raises:
            KeyError: `request_id` is not held.
        """
        if request_id is not None and request_id not in self._held:
            raise KeyError(request_id)
        for name in self.held if request_id is None else (request_id,):
            # The event loop may take a request out at the same moment, because it was cancelled or another one failed.
            held = self._held.pop(name, None)
            if held is not None:
                held[0].call_soon_threadsafe(_resolve, held[1])

    def die(self, log: str = "out of memory") -> None:
        """Fail every request, held ones too, and every health check from now on; from any thread."""
        self._death = log
        self.let_go()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(f"the fake engine died; its log ends with: {self._death}")

    def _answer(self, request: GenerationRequest, start_version: int) -> Generation:
        limit = request.sampling.max_tokens
        rng = random.Random(f"{request.prompt_ids}{request.seed}")
        drawn = rng.randint(1, limit)
        length = drawn if self._length is None else self._length(request) if callable(self._length) else self._length
        length = min(length, limit)
        stops = request.sampling.stop_token_ids
        usual = [token for token in range(self._vocabulary) if token not in stops]
        tokens = rng.choices(usual, k=length)
        stopped = bool(stops) and length < limit
        if stopped:
            tokens[-1] = stops[0]
        # As in a real engine, a response that was in flight during an update carries both versions.
        old = length // 2 if start_version != self.version else 0
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(tokens),
            logprobs=tuple(-rng.random() for _ in tokens),
            finish_reason="stop" if stopped else "length",
            policy_versions=(start_version,) * old + (self.version,) * (length - old),
        )


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
