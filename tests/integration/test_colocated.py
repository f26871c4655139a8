"""Generation on the training device: asleep from a step's first chunk until its critic is trained."""

import asyncio
import threading
from typing import Any

import lightning as L
import pytest
import torch

import lightning_ppo as ppo
from lightning_ppo.errors import StepError
from lightning_ppo.rollout.failure_config import FailureConfig
from lightning_ppo.testing import FakeEngine, make_prompt

ONCE = FailureConfig(max_infra_attempts=1, max_data_attempts=1)
COLOCATED = {"colocated": True, "failures": ONCE}


class Diary(FakeEngine):
    """Writes down what it is asked for; what it cannot do asleep, it refuses (see `FakeEngine`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.diary: list[str] = []
        self.lock = threading.Lock()

    def note(self, what: str) -> None:
        with self.lock:
            if not self.diary or self.diary[-1] != what:
                self.diary.append(what)

    async def generate(self, request: Any) -> Any:
        self.note("generate")
        return await super().generate(request)

    def update_weights(self, weights: Any, version: int) -> None:
        self.note(f"update {version}")
        super().update_weights(weights, version)

    def sleep(self) -> None:
        self.note("sleep")
        super().sleep()

    def wake(self) -> None:
        self.note("wake")
        super().wake()


class Phases(ppo.PPOCallback):
    def __init__(self, engine: Diary) -> None:
        self.engine = engine

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.engine.note("chunk")

    def on_policy_update_end(self, trainer, pl_module, payload):
        self.engine.note("policy")

    def on_critic_epoch_end(self, trainer, pl_module, payload):
        self.engine.note("critic")

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.engine.note("step end")


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("warmup", [0, 1])
def test_the_order_of_a_step(make_run, in_flight: bool, warmup: int) -> None:
    engine = Diary()
    run = make_run(
        3,
        fake=engine,
        rollout={**COLOCATED, "in_flight_weight_updates": in_flight},
        ppo_settings={"critic_warmup_steps": warmup},
        callbacks=[Phases(engine)],
    )
    run.fit()
    # Generation may start as soon as the weights are there; when exactly is the other thread's affair.
    training = [entry for entry in engine.diary if entry != "generate"]
    step = ["chunk", "sleep", "policy", "critic", "wake"]
    expected = ["update 0"]
    for version in (1, 2, 3):
        phases = [phase for phase in step if phase != "policy" or version > warmup]
        expected += [*phases, f"update {version}", "step end"]
    assert training == expected
    asleep = False
    for entry in engine.diary:
        asleep = entry == "sleep" or (asleep and not entry.startswith("update"))
        assert not (asleep and entry == "generate"), engine.diary
    assert engine.sleeps == [True, False] * 3
    assert run.trainer.global_step == 3


def test_it_trains_what_the_same_run_on_two_devices_trains(make_run) -> None:
    runs = [make_run(4, rollout=settings) for settings in ({}, COLOCATED)]
    for run in runs:
        run.fit()
    apart, together = (run.weights() for run in runs)
    assert [name for name in apart if not torch.equal(apart[name], together[name])] == []


def test_validation_between_steps_finds_the_engine_awake(make_run) -> None:
    engine = Diary()
    prompts = [{"prompt": "^ab="}, {"prompt": "^cd="}]
    run = make_run(
        2,
        fake=engine,
        rollout=COLOCATED,
        validation_prompts=prompts,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
    )
    run.fit()
    asked = [request.request_id for request in engine.requests if request.request_id.startswith("validation")]
    assert len(asked) == 2 * 3
    assert float(run.trainer.callback_metrics["val/reward_mean"]) > 0


def test_sleep_waits_for_what_is_still_generated(make_run) -> None:
    """A response outside of training is in flight when the first chunk arrives."""
    engine = Diary(delay_s=lambda request: 0.3 if request.request_id.startswith("side") else 0.0)
    side: list[Any] = []

    class Side(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            if payload.chunk.ppo_step == 0:
                prompt = make_prompt()
                sample = threading.Thread(
                    target=lambda: side.extend(pl_module.rollouts.sample([prompt], namespace="side")), daemon=True
                )
                sample.start()
                while not any(request.request_id.startswith("side") for request in engine.requests):
                    threading.Event().wait(0.001)

    run = make_run(1, fake=engine, rollout=COLOCATED, callbacks=[Side()])
    run.fit()
    assert len(side) == 1
    assert run.trainer.global_step == 1


def test_a_failure_while_it_sleeps_closes_the_engine(make_run) -> None:
    class Fails(ppo.PPOCallback):
        def on_critic_epoch_end(self, trainer, pl_module, payload):
            raise ArithmeticError("critic")

    engine = Diary()
    run = make_run(2, fake=engine, rollout=COLOCATED, callbacks=[Fails()])
    with pytest.raises(ArithmeticError):
        run.fit()
    assert engine.sleeps == [True]
    assert engine.closed
    assert run.trainer.global_step == 0


def test_a_step_that_lost_everything_is_noticed_before_the_engine_sleeps(make_run) -> None:
    engine = Diary(fails=lambda request: ValueError("no answer"))
    failures = FailureConfig(drop="skip", max_dropped_prompts=4, max_data_attempts=1)
    run = make_run(1, fake=engine, rollout={"colocated": True, "failures": failures})
    with pytest.raises(StepError, match="lost all of its 4 prompts"):
        run.fit()
    assert engine.sleeps == []


def test_a_slow_reward_of_an_attempt_that_failed_does_not_generate_asleep(make_run) -> None:
    tries: list[str] = []

    async def reward(prompt: str, response: str) -> float:
        tries.append(prompt)
        if len(tries) % 5 == 0:
            await asyncio.sleep(0.01)
            raise ConnectionError("refused")
        return 1.0

    engine = Diary()
    failures = FailureConfig(max_infra_attempts=5, backoff_s=0.01)
    run = make_run(3, fake=engine, reward=reward, rollout={"colocated": True, "failures": failures})
    run.fit()
    assert run.trainer.global_step == 3
    assert engine.sleeps == [True, False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_with_the_local_engine(policy_folder, tmp_path, backend: str) -> None:
    def fit(colocated: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        data = ppo.RolloutDataModule(
            [{"prompt": f"^{letter}="} for letter in "abcdefgh"],
            lambda prompt, response: len(response) / 8,
            rollout=ppo.RolloutConfig(
                num_prompts_per_step=2,
                num_generations_per_prompt=1 if backend == "transformers" else 2,
                min_groups_for_streaming_train=2,
                max_response_tokens=8,
                timeout_s=60.0,
                colocated=colocated,
                # one at a time: the transformers backend's last bits depend on what else is in the batch
                max_inflight_prompts=1 if backend == "transformers" else None,
                failures=ONCE,
            ),
            local=ppo.LocalEngineConfig(slots=4, backend=backend, trainer_threads=None),
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
            strategy=ppo.StreamingPPOStrategy(),
        )
        module = ppo.PPOModule(policy_folder)
        trainer.fit(module, data)
        assert trainer.global_step == 3
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    apart, together = fit(colocated=False), fit(colocated=True)
    assert [name for name in apart if not torch.equal(apart[name], together[name])] == []
