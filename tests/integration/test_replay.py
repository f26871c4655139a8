"""A run is repeated bit for bit from its schedule, or stops where it first differs."""

import asyncio
import json
import time
from pathlib import Path

import pytest
import torch
from draws import draw_of
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError, ConfigError, DataError, RolloutError
from lightning_ppo.rollout.local import LocalEngine
from lightning_ppo.rollout.local.config import LocalEngineConfig
from lightning_ppo.testing import FakeEngine

STEPS = 6
PROMPTS = 4
"""Per step, in `make_run`."""
PPO = {"importance_correction": "truncated", "normalize_advantages": "off"}
DRAINED = {
    "max_lookahead_versions": 1,
    "max_trajectory_age_steps": 1,
    "min_groups_for_streaming_train": 1,
    "in_flight_weight_updates": False,
}
IN_FLIGHT = {**DRAINED, "in_flight_weight_updates": True, "record_rollouts": True}


def leaves(value, path=""):
    """Every tensor and number of nested containers, by its path."""
    if isinstance(value, dict):
        return {name: leaf for key in value for name, leaf in leaves(value[key], f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {name: leaf for i, item in enumerate(value) for name, leaf in leaves(item, f"{path}/{i}").items()}
    return {path: value}


def is_same(one, other):
    """Whether two runs ended with equal parameters and optimizers of both models."""

    def learned(run):
        optimizers = {name: run.module.optimizer(name).state_dict() for name in ("policy", "critic")}
        return leaves({"weights": run.weights(), "optimizers": optimizers})

    first, second = learned(one), learned(other)
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


def letters(prompt, response):
    return sum(character.isalpha() for character in response) / 8


async def uneven_letters(prompt, response):
    """The same rewards, at other times: what is finished first differs."""
    await asyncio.sleep(0.003 * (len(response) * 7 % 11))
    return letters(prompt, response)


def uneven(request):
    return 0.002 * (request.seed % 11)


def steps_of(path):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row for row in rows if "run" not in row]


def draws_of(row):
    return [draw for chunk in row["chunks"] for draw in chunk]


def schedule_of(run):
    return str(Path(run.trainer.log_dir) / "schedule.jsonl")


@pytest.fixture
def run(make_run, tmp_path):
    """Build a run that writes its schedule: `run(rollout, replays=path)`, then `.fit()`."""

    def build(rollout, steps=STEPS, *, replays=None, warmup=0, fake=None, **settings):
        rollout = {**rollout, **({} if replays is None else {"replay_schedule": replays})}
        settings = {"ppo_settings": {**PPO, "critic_warmup_steps": warmup}, "reward": letters} | settings
        engine = FakeEngine(delay_s=uneven) if fake is None else fake
        return make_run(steps, rollout=rollout, fake=engine, logger=CSVLogger(tmp_path), **settings)

    return build


def local(slots=8):
    return LocalEngine(LocalEngineConfig(slots=slots))


# ---------------------------------------------------------------------- the same run again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "warmup"),
    [
        ({"sampler": "in_order"}, 0),
        ({"sampler": "ready_first"}, 0),
        ({"sampler": "windowed"}, 0),
        ({"sampler": "in_order", "warmup_generation_lead_steps": 3}, 2),
        ({"sampler": "weight_fifo", "warmup_generation_lead_steps": 2}, 2),
    ],
)
def test_an_asynchronous_run_is_repeated_bit_for_bit(run, rollout, warmup):
    """With the built-in engine, responses generated again, other delays and fewer slots."""
    rollout = {**DRAINED, **rollout}
    first = run(rollout, fake=local(), warmup=warmup, reward=uneven_letters)
    first.fit()
    assert any(record[0] < row["ppo_step"] for row in steps_of(schedule_of(first)) for record in row["groups"])
    again = run(rollout, fake=local(3), warmup=warmup, replays=schedule_of(first))
    again.fit()
    assert is_same(first, again)
    assert steps_of(schedule_of(again)) == steps_of(schedule_of(first))


class Spanning(LocalEngine):
    """What is generated for the next step begins just before the next weights come, one response after the other."""

    def __init__(self):
        super().__init__(LocalEngineConfig(slots=1))
        self.version = 0

    async def generate(self, request):
        while draw_of(request) // PROMPTS > self.version:
            await asyncio.sleep(0.001)
        return await super().generate(request)

    def update_weights(self, weights, version):
        self.version = version
        if version > 0:
            time.sleep(0.02)
        super().update_weights(weights, version)


@pytest.mark.slow
def test_responses_that_span_versions_are_repeated_from_their_records(run):
    """With the built-in engine and weights that change in mid-response."""
    first = run(IN_FLIGHT, fake=Spanning(), reward=uneven_letters)
    first.fit()
    records = [record for row in steps_of(schedule_of(first)) for record in row["groups"]]
    assert any(len(record) == 5 and record[1] < record[2] for record in records)
    again = run(IN_FLIGHT, replays=schedule_of(first))
    again.fit()
    assert is_same(first, again)
    assert again.fake.requests == []


@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "windowed", "weight_fifo"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_every_sampler_is_repeated(run, sampler, warmup):
    rollout = {**DRAINED, "sampler": sampler} | ({"warmup_generation_lead_steps": 3} if warmup else {})
    first = run(rollout, warmup=warmup)
    first.fit()
    again = run(rollout, warmup=warmup, replays=schedule_of(first), fake=FakeEngine(), reward=uneven_letters)
    again.fit()
    assert is_same(first, again)
    assert steps_of(schedule_of(again)) == steps_of(schedule_of(first))


class LetGo(ppo.PPOCallback):
    """Answers held requests once the weights have changed for the first time."""

    def __init__(self, engine):
        self.engine = engine

    def on_refit_end(self, trainer, pl_module, payload):
        if payload.policy_version == 1:
            self.engine.let_go()


def spanning(run, rollout):
    """A finished run in which draw 4 spans two versions."""
    engine = FakeEngine(length=6, holds=lambda request: request.request_id == "draw4_g0")
    first = run(rollout, fake=engine, callbacks=[LetGo(engine)])
    first.fit()
    return first


def test_recorded_responses_need_no_engine_for_training(run):
    """Not one request, although a response spans two versions, and validation still asks the engine."""
    first = spanning(run, IN_FLIGHT)
    row = next(row for row in steps_of(schedule_of(first)) if 4 in draws_of(row))
    record = row["groups"][draws_of(row).index(4)]
    assert record[:3] == [0, 0, 1]
    again = run(IN_FLIGHT, replays=schedule_of(first), validation_prompts=[{"prompt": "^ab="}])
    again.fit()
    assert is_same(first, again)
    assert {request.request_id for request in again.fake.requests} == {f"validation{n}_0" for n in range(1, STEPS + 1)}


def test_fewer_steps_are_repeated_too(run):
    first = run(DRAINED)
    first.fit()
    again = run(DRAINED, 3, replays=schedule_of(first))
    again.fit()
    assert steps_of(schedule_of(again)) == steps_of(schedule_of(first))[:3]


def test_the_schedule_is_complete_and_compact(run):
    """Settings and seed, and per group its step, versions and chunk; some 40 bytes each."""
    first = run({**DRAINED, "num_prompts_per_step": 24, "num_generations_per_prompt": 1})
    first.fit()
    lines = Path(schedule_of(first)).read_text().splitlines()
    header = json.loads(lines[0])["run"]
    assert (header["seed"], header["num_prompts_per_step"], header["num_generations_per_prompt"]) == (0, 24, 1)
    assert (header["sampler"], header["temperature"], header["ppo_step"]) == ("in_order", 1.0, 0)
    assert (header["max_lookahead_versions"], header["max_trajectory_age_steps"]) == (1, 1)
    steps = steps_of(schedule_of(first))
    assert [row["ppo_step"] for row in steps] == list(range(STEPS))
    for row in steps:
        draws = draws_of(row)
        assert sorted(draws) == list(range(24 * row["ppo_step"], 24 * row["ppo_step"] + 24))
        assert {record[0] for record in row["groups"]} <= {row["ppo_step"], row["ppo_step"] - 1}
    assert max(len(line) for line in lines[1:]) < 24 * 40


# ---------------------------------------------------------------------- where it differs


def test_another_reward_is_named(run):
    first = run(DRAINED, 3)
    first.fit()
    again = run(DRAINED, 3, replays=schedule_of(first), reward=lambda response: letters("", response) + 1)
    # the lowest draw of the first chunk, whatever was finished first
    draw = min(steps_of(schedule_of(first))[0]["chunks"][0])
    with pytest.raises(RolloutError, match=rf"first differs at draw {draw} \(row \d+\) of PPO step 0: rewards differ;"):
        again.fit()
    assert again.trainer.global_step == 0


def test_other_responses_are_named(run):
    first = run(DRAINED, 3, fake=FakeEngine(length=4))
    first.fit()
    other = FakeEngine(length=lambda request: 5 if request.request_id == "draw6_g1" else 4)
    again = run(DRAINED, 3, replays=schedule_of(first), fake=other)
    with pytest.raises(RolloutError, match=r"first differs at draw 6 \(row \d+\) of PPO step 1: responses differ;"):
        again.fit()


@pytest.mark.parametrize("rollout", [DRAINED, IN_FLIGHT])
def test_another_learning_rate_is_noticed_at_the_first_update(run, rollout):
    """Also where the responses are recorded, and so do not depend on it."""

    def optimizer(lr):
        return {"policy_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr)}

    first = run(rollout, 3, module=optimizer(0.1))
    first.fit()
    again = run(rollout, 3, replays=schedule_of(first), module=optimizer(0.2))
    with pytest.raises(RolloutError, match="first differs at the update of PPO step 0: the policy's weights differ;"):
        again.fit()


def test_another_policy_is_noticed_before_anything_is_generated(run, policy_folder):
    first = run(DRAINED, 2)
    first.fit()
    again = run(DRAINED, 2, replays=schedule_of(first))
    with torch.no_grad():
        next(again.module.policy.parameters()).add_(0.01)
    with pytest.raises(RolloutError, match="first differs at the start at PPO step 0: the policy's weights differ;"):
        again.fit()
    assert again.fake.requests == []


# ---------------------------------------------------------------------- what is refused at set-up


@pytest.fixture
def recorded(run):
    """A finished run of three steps, and its schedule."""
    first = run(DRAINED, 3)
    first.fit()
    return first, schedule_of(first)


def refused(again, error, message):
    """The replay is refused in one line, before its engine starts."""
    with pytest.raises(error, match=message) as caught:
        again.fit()
    assert "\n" not in str(caught.value)
    assert again.fake.spec is None


@pytest.mark.parametrize(
    ("setting", "value", "then"),
    [
        ("seed", 1, "0"),
        ("temperature", 0.5, "1.0"),
        ("sampler", "ready_first", "in_order"),
        ("num_generations_per_prompt", 3, "2"),
        ("max_response_tokens", 7, "8"),
        ("max_lookahead_versions", 0, "1"),
        ("max_trajectory_age_steps", 2, "1"),
        ("shuffle", False, "True"),
    ],
)
def test_other_settings_are_refused(run, recorded, setting, value, then):
    again = run({**DRAINED, setting: value}, 3, replays=recorded[1])
    refused(again, ConfigError, rf"^{setting}={value} differs from that of replay_schedule=.*; set {then}$")


def test_other_prompts_are_refused(run, recorded):
    again = run(DRAINED, 3, replays=recorded[1], prompts=[{"prompt": "^ab="}] * 24)
    refused(again, ConfigError, "^prompts differ from those of replay_schedule=.*; replay with the same data set$")


def test_critic_warmup_of_another_length_is_refused(run, recorded):
    again = run(DRAINED, 3, replays=recorded[1], warmup=1)
    refused(again, ConfigError, "^critic_warmup_steps=1 differs from that of replay_schedule=.*; set 0$")


@pytest.mark.parametrize("steps", [4, -1])
def test_going_on_for_longer_is_refused(run, recorded, steps):
    again = run(DRAINED, steps, replays=recorded[1])
    refused(again, ConfigError, rf"trainer.max_epochs={steps} is more than .* holds; set trainer.max_epochs=3")


def edited(recorded, change):
    """A copy of the schedule in a folder of its own, its lines changed."""
    path = Path(recorded[1])
    lines = change(path.read_text().splitlines())
    (path.parent / "copy").mkdir()
    (path.parent / "copy/schedule.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(path.parent / "copy/schedule.jsonl")


def without_records(line):
    row = json.loads(line)
    return json.dumps({key: value for key, value in row.items() if key in ("run", "ppo_step", "chunks")})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        # a kill may cut the last line off, and nothing else
        (
            lambda lines: [*lines[:-1], lines[-1][:-9]],
            ConfigError,
            "max_epochs=3 is more than .* set trainer.max_epochs=2",
        ),
        (
            lambda lines: [*lines[:2], lines[2][:-9], lines[3]],
            DataError,
            r"schedule.jsonl line 3: .*; every line must be",
        ),
        (lambda lines: lines[:-1], ConfigError, "max_epochs=3 is more than .* holds; set trainer.max_epochs=2"),
        (lambda lines: [lines[0], *lines[2:]], CheckpointError, "begins with PPO step 1, this run with 0"),
        (lambda lines: [*lines[:2], lines[3]], DataError, "lacks PPO step 1; give the whole schedule.jsonl"),
        (lambda lines: lines[1:], DataError, "records no prompt group; give the schedule.jsonl of a run"),
        (lambda lines: lines[:1], DataError, "records no prompt group; give the schedule.jsonl of a run"),
        (lambda lines: list(map(without_records, lines)), DataError, "records no prompt group"),
        (lambda lines: [*lines[:3], lines[2].replace('"ppo_step":1', '"ppo_step":2')], DataError, "in PPO steps 1 and"),
        (lambda lines: [], DataError, "records no prompt group"),
    ],
)
def test_an_incomplete_schedule_is_refused(run, recorded, change, error, message):
    refused(run(DRAINED, 3, replays=edited(recorded, change)), error, message)


def test_a_missing_schedule_is_refused(run):
    refused(run(DRAINED, 3, replays="nowhere.jsonl"), DataError, "^replay_schedule=nowhere.jsonl cannot be read")


def test_versions_that_change_in_a_response_need_records(run):
    first = spanning(run, {**IN_FLIGHT, "record_rollouts": False})
    again = run({**IN_FLIGHT, "record_rollouts": False}, replays=schedule_of(first))
    refused(again, DataError, "has draw 4 of policy versions 0 to 1, whose switch cannot be repeated; record with")


def test_missing_responses_are_refused(run):
    first = spanning(run, IN_FLIGHT)
    journal = Path(schedule_of(first)).parent / "journal"
    sorted(journal.iterdir())[0].unlink()
    message = r"needs the responses of draw 0 \(\d+ are missing\), which the run recorded; put its journal"
    refused(run(IN_FLIGHT, replays=schedule_of(first)), DataError, message)


def test_damaged_responses_are_refused(run):
    first = spanning(run, IN_FLIGHT)
    file = sorted((Path(schedule_of(first)).parent / "journal").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(run(IN_FLIGHT, replays=schedule_of(first)), CheckpointError, "is damaged at byte")


def test_vllm_without_records_is_refused(run, recorded):
    again = run(DRAINED, 3, replays=recorded[1])
    again.data.engine_config = ppo.VLLMConfig()
    refused(again, ConfigError, "has no recorded responses, and this engine's depend on what else is generated")


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_a_replay_into_the_folder_of_the_recorded_run_is_refused(make_run, run, recorded, tmp_path):
    again = make_run(
        3,
        rollout={**DRAINED, "replay_schedule": recorded[1]},
        ppo_settings=PPO,
        logger=CSVLogger(tmp_path, version=0),
    )
    refused(again, ConfigError, "is this run's own, which it would write over; give the replay a folder of its own")


# ---------------------------------------------------------------------- resuming a repeated run


class SaveAt(ppo.PPOCallback):
    """Saves at the end of each of these PPO steps."""

    def __init__(self, folder, *steps):
        self.folder, self.steps = folder, steps

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("rollout", [DRAINED, IN_FLIGHT, {**DRAINED, "sampler": "ready_first"}])
def test_a_repeated_run_is_resumed_in_the_middle(run, tmp_path, rollout):
    """From its own checkpoint, whose groups of the version before are not generated again."""
    first = run(rollout)
    first.fit()
    whole = run(rollout, replays=schedule_of(first), reward=uneven_letters, callbacks=[SaveAt(tmp_path, 3)])
    whole.fit()
    resumed = run(rollout, replays=schedule_of(first))
    resumed.fit(tmp_path / "3.ckpt")
    assert is_same(first, whole)
    assert is_same(first, resumed)
    lines = [json.loads(line) for line in Path(schedule_of(resumed)).read_text().splitlines()]
    assert lines[0]["run"]["ppo_step"] == 3
    assert lines[1:] == steps_of(schedule_of(first))[3:]


def test_a_replay_starts_from_a_checkpoint_of_the_recorded_run(run, tmp_path):
    """In-order runs finish a step's groups in time, here before the checkpoint."""
    rollout = {**DRAINED, "max_lookahead_versions": 0}
    first = run(rollout, callbacks=[SaveAt(tmp_path, 2)])
    first.fit()
    resumed = run(rollout, replays=schedule_of(first))
    resumed.fit(tmp_path / "2.ckpt")
    assert is_same(first, resumed)


def test_a_resumed_run_is_repeated_from_its_checkpoint(run, tmp_path):
    """Its schedule begins in the middle: from the start it cannot be repeated."""
    first = run(DRAINED, 4, callbacks=[SaveAt(tmp_path, 2)])
    first.fit()
    second = run({**DRAINED, "record_rollouts": True})
    second.fit(tmp_path / "2.ckpt")
    again = run({**DRAINED, "record_rollouts": True}, replays=schedule_of(second))
    again.fit(tmp_path / "2.ckpt")
    assert is_same(second, again)
    assert again.fake.requests == []
    fresh = run(DRAINED, replays=schedule_of(second))
    refused(fresh, CheckpointError, "begins with PPO step 2, this run with 0; resume from the checkpoint that the")


def test_what_a_resumed_run_did_before_is_void(run, recorded, tmp_path):
    """Resumed in the same folder: steps after the checkpoint count only if the resumed run did them."""
    first = run(DRAINED, 5, callbacks=[SaveAt(tmp_path, 2)])
    first.fit()
    again = run(DRAINED, 4)
    again.fit(tmp_path / "2.ckpt")
    both = Path(schedule_of(first)).read_text() + Path(schedule_of(again)).read_text()
    path = tmp_path / "schedule.jsonl"
    path.write_text(both)
    longer = run(DRAINED, 5, replays=str(path))
    refused(longer, ConfigError, "max_epochs=5 is more than .* holds; set trainer.max_epochs=4")
    repeated = run(DRAINED, 4, replays=str(path))
    repeated.fit()
    assert is_same(again, repeated)


def test_a_checkpoint_of_another_run_is_refused(run, recorded, tmp_path):
    """Before anything is generated; here its policy is another one."""
    other = run({**DRAINED, "num_prompts_per_step": 2}, 3, callbacks=[SaveAt(tmp_path, 2)])
    other.fit()
    again = run(DRAINED, 3, replays=recorded[1])
    with pytest.raises(RolloutError, match="first differs at the update of PPO step 1: the policy's weights differ;"):
        again.fit(tmp_path / "2.ckpt")
    assert again.fake.requests == []


def held_back(draw):
    """An engine that is slow with one draw."""
    return FakeEngine(delay_s=lambda request: 0.3 if request.request_id.startswith(f"draw{draw}_") else 0.0)


def frozen(run, rollout, steps, **settings):
    """A run whose policy never changes."""
    module = {"policy_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    return run(rollout, steps, module=module, **settings)


def test_a_checkpoint_that_trained_other_prompts_is_refused(run, tmp_path):
    """Even if its policy is the same."""
    other = frozen(run, {**DRAINED, "sampler": "ready_first"}, 2, callbacks=[SaveAt(tmp_path, 1)], fake=held_back(0))
    other.fit()
    first = frozen(run, {**DRAINED, "sampler": "ready_first"}, 2, fake=held_back(1))
    first.fit()
    again = frozen(run, {**DRAINED, "sampler": "ready_first"}, 2, replays=schedule_of(first))
    with pytest.raises(CheckpointError, match=r"the checkpoint of PPO step 1 has (not )?trained draw [01]"):
        again.fit(tmp_path / "1.ckpt")
    assert again.fake.requests == []
