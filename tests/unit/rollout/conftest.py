import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.rollout.samplers import make_sampler
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.testing import CHARACTERS, FakeEngine, char_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return char_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    template = (
        "{% for m in messages %}{{ '|' if m.role == 'user' else '!' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    return char_tokenizer(template)


@pytest.fixture
def build(tokenizer: Any) -> Iterator[Callable[..., tuple[Collector, FakeEngine]]]:
    """Build a collector over `rows` distinct prompts `^x=`; every collector is closed at the end."""
    built: list[Collector] = []

    def make(
        engine: FakeEngine | None = None,
        *,
        rows: int = 16,
        reward: Any = lambda response, answer: float(response == answer),
        seed: int = 0,
        shuffle: bool = False,
        align: int = 1,
        schedule: Any = None,
        keep: Any = None,
        **settings: Any,
    ) -> tuple[Collector, FakeEngine]:
        defaults = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "min_groups_for_streaming_train": 4,
            "max_response_tokens": 6,
            "timeout_s": 20.0,
            "max_trajectory_age_steps": max(1, settings.get("max_lookahead_versions", 0)),
            "failures": FailureConfig(backoff_s=0.0),
        }
        config = RolloutConfig(**(defaults | settings))
        engine = FakeEngine() if engine is None else engine
        prompts = PromptSet(
            [{"prompt": f"^{CHARACTERS[6 + row]}=", "answer": CHARACTERS[6 + row]} for row in range(rows)], tokenizer, 3
        )
        collector = Collector(
            engine,
            prompts,
            PromptStream(rows, seed, shuffle, keep=keep),
            RewardFunction(reward, prompts.columns, config.reward_timeout_s),
            make_sampler(config),
            config,
            tokenizer=tokenizer,
            run_seed=seed,
            align=align,
            stop_token_ids=(1,),
            schedule=schedule,
        )
        built.append(collector)
        return collector, engine

    yield make
    for collector in built:
        collector.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait, bounded, until another thread has made something true."""

    def wait(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            assert time.monotonic() < deadline, "never became true"
            time.sleep(0.001)

    return wait


@pytest.fixture
def train() -> Callable[..., list[list[tuple[PromptGroup, ...]]]]:
    """Train steps as the strategy does: chunks, refit, version, release. Returns the chunks of every step."""

    def run(
        collector: Collector,
        engine: FakeEngine,
        steps: range,
        size: int = 4,
        between: Callable[[], None] = lambda: None,
    ) -> list[list[tuple[PromptGroup, ...]]]:
        if steps.start not in engine.versions:
            engine.update_weights([], steps.start)
        collector.start(steps.start, steps.start)
        seen = []
        for step in steps:
            chunks: list[tuple[PromptGroup, ...]] = []
            while (consumed := sum(map(len, chunks))) < size:
                between()
                chunks.append(collector.next_groups(step, consumed, lambda: None).groups)
            engine.update_weights([], step + 1)
            collector.publish_version(step + 1)
            collector.release([group.draw for chunk in chunks for group in chunk])
            seen.append(chunks)
        return seen

    return run
