import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import PolicySpec
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig


def _spec(model, context=64) -> PolicySpec:
    return PolicySpec(model.config.to_json_string(use_diff=False), context)


def _wait_gone(pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def started(policy):
    """Start an engine of a llama policy, with weights unless told otherwise; closed after the test."""
    engines = []

    def start(weights=True, log_path=None, context=64, name="llama", **settings):
        engine = LocalEngine(LocalEngineConfig(**{"slots": 4, "num_threads": 1, **settings}), log_path)
        engines.append(engine)
        model = policy(name)
        engine.start(_spec(model, context))
        if weights:
            engine.update_weights(model.state_dict().items(), 0)
        return engine, model

    yield start
    for engine in engines:
        engine.close()


def _long_request(request_of, seed=0):
    return request_of((1, 2, 3), seed=seed, max_tokens=3900)


@pytest.mark.slow
def test_life_of_an_engine(started, build, drive, request_of, sample_all, policy, tmp_path) -> None:
    engine, model = started(weights=False, log_path=tmp_path / "logs" / "engine.log")
    assert engine.backend == "native"
    request = request_of((1, 2, 3), seed=5)
    with pytest.raises(EngineError, match="no weights yet"):
        asyncio.run(engine.generate(request))
    with pytest.raises(EngineError, match="empty in the first update"):
        engine.update_weights([], 0)
    with pytest.raises(EngineError, match=r"model\.norm\.weight is missing"):
        engine.update_weights([(n, t) for n, t in model.state_dict().items() if n != "model.norm.weight"], 0)
    engine.update_weights(model.named_parameters(), 3)
    requests = [request_of((1, 2, 3), seed=seed, stop_token_ids=(4, 5)) for seed in range(50)]
    # The process adds nothing and loses nothing: bitwise what its inside gives.
    expected = drive(build(model, slots=4), requests)
    for here, there in zip(expected, sample_all(engine, requests), strict=True):
        assert (here.token_ids, here.logprobs, here.finish_reason) == (
            there.token_ids,
            there.logprobs,
            there.finish_reason,
        )
        assert there.request_id == here.request_id
        assert set(there.policy_versions) == {3}
    with pytest.raises(EngineError, match="was not among the first weights"):
        engine.update_weights([("nonsense", torch.ones(1))], 4)
    engine.update_weights([], 4)
    (same,) = sample_all(engine, [requests[0]])
    assert (same.logprobs, set(same.policy_versions)) == (expected[0].logprobs, {4})
    other = policy("llama", seed=1)
    engine.update_weights(reversed(list(other.named_parameters())), 5)
    (changed,) = sample_all(engine, [requests[0]])
    assert (changed.token_ids, changed.logprobs) == tuple(
        getattr(drive(build(other, slots=4), [requests[0]])[0], field) for field in ("token_ids", "logprobs")
    )
    for bad, message in (
        (request_of(range(29), max_tokens=1), None),
        (request_of([1] * 64), "prompt_ids=64 tokens leave no room for a response in max_context_tokens=64"),
        (request_of(()), "empty"),
        (request_of((29,)), "prompt_ids=29 is outside the vocabulary"),
        (request_of((1,), temperature=-1.0), "temperature=-1.0"),
        (request_of((1,), temperature=float("nan")), "temperature=nan"),
        (request_of((1,), top_p=0.0), "top_p=0.0"),
        (request_of((1,), max_tokens=0), "max_tokens=0"),
        (request_of((1,), seed=-1), "seed=-1"),
    ):
        if message is None:
            sample_all(engine, [bad])
            continue
        with pytest.raises(EngineError, match=message):
            sample_all(engine, [bad])
    pid = engine.pid
    os.kill(pid, signal.SIGINT)
    sample_all(engine, requests[:2])
    engine.check_health()
    with pytest.raises(EngineError, match="started or closed before"):
        engine.start(_spec(model))
    engine.close()
    engine.close()
    assert _wait_gone(pid, 1)
    assert (tmp_path / "logs" / "engine.log").read_text().startswith("backend native")
    with pytest.raises(EngineDiedError, match="closed"):
        asyncio.run(engine.generate(request))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("local-engine")]


@pytest.mark.slow
def test_weights_arrive_while_requests_are_in_flight_and_cancelled_ones_free_their_slots(started, request_of) -> None:
    engine, model = started(context=4000, slots=2)

    async def run():
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(engine.generate(_long_request(request_of, seed))) for seed in range(4)]
        await asyncio.sleep(0.3)
        await loop.run_in_executor(None, engine.update_weights, model.state_dict().items(), 1)
        for task in tasks[1:]:
            task.cancel()
        # Two of the cancelled ones held or waited for slots: without the abort this one would come last.
        short = await asyncio.wait_for(engine.generate(request_of((1, 2), max_tokens=3)), 30)
        done_before = tasks[0].done()
        return await asyncio.wait_for(tasks[0], 60), short, done_before

    first, short, done_before = asyncio.run(run())
    assert not done_before
    assert set(short.policy_versions) == {1}
    assert len(first.token_ids) == 3900
    assert set(first.policy_versions) == {0, 1}
    assert list(first.policy_versions) == sorted(first.policy_versions)


@pytest.mark.slow
def test_a_killed_engine_is_noticed_and_reported_with_the_end_of_its_log(started, request_of, tmp_path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("from an earlier run\n")
    engine, _ = started(context=4000, log_path=log)

    async def run():
        tasks = [asyncio.create_task(engine.generate(_long_request(request_of, seed))) for seed in range(6)]
        await asyncio.sleep(0.2)
        os.kill(engine.pid, signal.SIGKILL)
        # An idle machine needs milliseconds; the bound leaves room for a busy one.
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    for result in asyncio.run(run()):
        assert isinstance(result, EngineDiedError)
        assert "signal 9" in str(result)
        assert str(result).endswith("last lines of its log: backend native")
        assert "\n" not in str(result)
    with pytest.raises(EngineDiedError, match="signal 9"):
        engine.check_health()
    with pytest.raises(EngineDiedError, match="signal 9"):
        engine.update_weights([], 1)
    with pytest.raises(EngineDiedError, match="signal 9"):
        asyncio.run(engine.generate(request_of((1, 2))))


@pytest.mark.slow
def test_an_error_in_the_engine_reaches_every_waiting_request(started, request_of, sample_all) -> None:
    engine, model = started()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["model.norm.weight"].fill_(float("nan"))
    engine.update_weights(weights.items(), 1)
    with pytest.raises(EngineDiedError, match=r"exit code 1.*policy version 1 gives logits that are not finite"):
        sample_all(engine, [request_of((1, 2), seed=seed) for seed in range(3)])


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_stopped_at_its_deadline(started, request_of) -> None:
    engine, model = started(update_timeout_s=0.3)
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"update_timeout_s=0\.3"):
        engine.update_weights(model.state_dict().items(), 1)
    assert _wait_gone(pid, 5)
    with pytest.raises(EngineDiedError):
        asyncio.run(engine.generate(request_of((1, 2))))


def test_a_start_that_takes_too_long_names_the_setting(policy) -> None:
    engine = LocalEngine(LocalEngineConfig(start_timeout_s=0.01))
    with pytest.raises(EngineError, match=r"start_timeout_s=0.01 ran out"):
        engine.start(_spec(policy("llama")))
    assert _wait_gone(engine.pid, 5)


@pytest.mark.slow
def test_a_device_that_is_not_there_is_refused_in_one_line(policy) -> None:
    name = f"cuda:{torch.cuda.device_count()}"
    engine = LocalEngine(LocalEngineConfig(device=name))
    with pytest.raises(
        EngineError, match=rf"^device={name} cannot be used here \([^\n]+\); set local.device=cpu$"
    ) as raised:
        engine.start(_spec(policy("llama")))
    assert not isinstance(raised.value, EngineDiedError)
    assert _wait_gone(engine.pid, 5)


@pytest.mark.slow
def test_native_refuses_other_architectures_and_auto_falls_back(policy, started, request_of, sample_all) -> None:
    refused = LocalEngine(LocalEngineConfig(backend="native"))
    with pytest.raises(EngineError, match="backend=native cannot serve model_type=gpt2"):
        refused.start(_spec(policy("gpt2")))
    assert _wait_gone(refused.pid, 5)
    engine, _ = started(name="gpt2")
    assert engine.backend == "transformers"
    (generation,) = sample_all(engine, [request_of((1, 2))])
    assert len(generation.token_ids) == 12


_TRAINER = """
import asyncio, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.rollout.engine import GenerationRequest, PolicySpec, SamplingParams
from lightning_ppo.rollout.local import LocalEngine
config = LlamaConfig(vocab_size=29, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
engine = LocalEngine(LocalEngineConfig(slots=2))
engine.start(PolicySpec(config.to_json_string(use_diff=False), 4000))
engine.update_weights(AutoModelForCausalLM.from_config(config).state_dict().items(), 0)
print(engine.pid, flush=True)
request = GenerationRequest("a", (1, 2), SamplingParams(3900), 0)
async def main():
    await asyncio.gather(*[engine.generate(request) for _ in range(100)])
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_does_not_outlive_a_killed_trainer(ending) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(trainer.pid, ending)
        assert _wait_gone(pid, 5)
    finally:
        trainer.kill()
        trainer.wait()
        if trainer.stdout is not None:
            trainer.stdout.close()


def test_the_worker_does_not_import_lightning() -> None:
    code = (
        "import sys, lightning_ppo.rollout.local.worker\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('lightning', 'pytorch_lightning', 'torchmetrics')])"
    )
    root = Path(__file__).parents[3]
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60, check=True
    )
    assert output.stdout.strip() == "[]"


def test_generate_before_start_is_an_error(request_of) -> None:
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(LocalEngine(LocalEngineConfig()).generate(request_of((1,))))
