"""What a resumed run keeps of the rollouts in its checkpoint and journal, and what it refuses."""

import logging
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError
from lightning_ppo.testing import FakeEngine

SGD = {f"{name}_optimizer": partial(torch.optim.SGD, lr=0.1) for name in ("policy", "critic")}
OFF_POLICY = {"importance_correction": "truncated"}
AHEAD = {"max_lookahead_versions": 2, "max_trajectory_age_steps": 2}
KEY = "lightning_ppo"


def draw_of(request):
    return int(request.request_id.split("_")[0].removeprefix("draw"))


class Steps(ppo.PPOCallback):
    """Draws and policy age of every completed step."""

    def __init__(self):
        self.draws, self.ages = {}, []

    def on_ppo_step_end(self, trainer, pl_module, payload):
        ids = {row.trajectory.sample_id for row in payload.batch.rows}
        self.draws[payload.ppo_step - 1] = sorted({int(name.split("_")[0][4:]) for name in ids})
        self.ages.append(payload.metrics["rollout/policy_age_max"])


class SaveWhen(ppo.PPOCallback):
    """Saves after `steps` steps, as soon as the checkpoint would hold `ready` finished groups."""

    def __init__(self, path, steps, ready=0):
        self.path, self.steps, self.ready = path, steps, ready

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step != self.steps:
            return
        deadline = time.monotonic() + 20
        while pl_module.rollouts.position()["rollouts"]["num_ready"] < self.ready:
            assert time.monotonic() < deadline, pl_module.rollouts.position()["rollouts"]
            time.sleep(0.005)
        trainer.save_checkpoint(self.path)


def assert_each_once(run, steps, already):
    """Nothing twice and nothing lost: what was trained and what the buffer holds are all draws up to the last."""
    trained = [draw for draws in steps.draws.values() for draw in draws]
    held = run.data.position()["rollouts"]["draws"]
    everything = sorted([*already, *trained, *held])
    assert everything == list(range(len(everything)))


# ---------------------------------------------------------------- other settings than those of the checkpoint


@pytest.fixture
def checkpoint(make_run, tmp_path):
    """After two steps; of steps 2 to 4, draw 9 lacks a response, draw 17 both, and step 3 is complete."""
    path = tmp_path / "two.ckpt"
    missing = ("draw9_g1", "draw17_g0", "draw17_g1")
    fake = FakeEngine(holds=lambda request: request.request_id in missing)
    first = make_run(2, rollout=AHEAD, ppo_settings=OFF_POLICY, fake=fake, callbacks=[SaveWhen(path, 2, ready=10)])
    first.fit()
    saved = torch.load(path, weights_only=True)[KEY]["prompts"]["rollouts"]
    assert (saved["num_ready"], saved["draws"][10:]) == (10, [9, 17])
    return path


KEPT = {9: 1, 17: 2}
ALL = dict.fromkeys(range(8, 20), 2)
SAME = {2: [8, 9, 10, 11], 3: [12, 13, 14, 15], 4: [16, 17, 18, 19], 5: [20, 21, 22, 23]}
POLICIES = {
    "gaps are filled": ({}, KEPT, SAME),
    "incomplete steps again": ({"restore": "drop_incomplete"}, {d: 2 for d in ALL if not 12 <= d < 16}, SAME),
    "nothing": ({"restore": "none"}, ALL, SAME),
    "larger capacity": ({"max_buffered_rollouts": 40}, KEPT, SAME),
    "smaller capacity": (
        {"max_lookahead_versions": 1, "max_buffered_rollouts": 8},
        {9: 1, **dict.fromkeys(range(16, 20), 2)},
        SAME,
    ),
    "stale groups first": (
        {"max_lookahead_versions": 0, "max_trajectory_age_steps": 0, "restore": "drop_incomplete"},
        ALL,
        SAME,
    ),
    # steps 2 and 3 were sampled from versions 0 and 1
    "stale groups": ({"max_lookahead_versions": 1, "max_trajectory_age_steps": 1}, ALL, SAME),
    "fewer prompts per step": (
        {"num_prompts_per_step": 2, "min_groups_for_streaming_train": 1},
        {9: 1, 17: 2, **dict.fromkeys((10, 11, 14, 15, 18, 19), 2)},
        {2: [8, 9], 3: [12, 13], 4: [16, 17], 5: [10, 11]},
    ),
    "more prompts per step": (
        {"num_prompts_per_step": 6},
        KEPT,
        {2: [*range(8, 12), 20, 21], 3: [*range(12, 16), 22, 23], 4: [*range(16, 20), 24, 25]},
    ),
    "another temperature": ({"temperature": 0.5}, ALL, SAME),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_and_what_is_generated_again(make_run, checkpoint, name, caplog):
    changes, again, expected = POLICIES[name]
    steps = Steps()
    run = make_run(6, rollout={**AHEAD, **changes}, ppo_settings=OFF_POLICY, callbacks=[steps])
    with caplog.at_level(logging.WARNING, logger="lightning_ppo"):
        run.fit(checkpoint)
    assert {step: steps.draws[step] for step in expected} == expected
    assert Counter(draw for draw in map(draw_of, run.fake.requests) if draw < 20) == again
    assert_each_once(run, steps, range(8))
    assert max(steps.ages) <= run.data.rollout.max_trajectory_age_steps
    warned = "saved rollouts are generated again: they were sampled with other settings" in caplog.text
    assert warned == (name == "another temperature")


@pytest.mark.parametrize("sampler", ["ready_first", "windowed", "weight_fifo"])
def test_rollouts_of_another_sampler_are_generated_again(make_run, checkpoint, sampler, caplog):
    steps = Steps()
    run = make_run(6, rollout={**AHEAD, "sampler": sampler}, ppo_settings=OFF_POLICY, callbacks=[steps])
    with caplog.at_level(logging.WARNING, logger="lightning_ppo"):
        run.fit(checkpoint)
    assert f"generated again: they were drawn by sampler=in_order, this run has {sampler}" in caplog.text
    assert Counter(map(draw_of, run.fake.requests)).items() >= ALL.items()
    assert_each_once(run, steps, range(8))


# ---------------------------------------------------------------- what is refused


def assert_refused(run, path, match, before):
    """One line, and nothing of the checkpoint was loaded or started."""
    with pytest.raises(CheckpointError, match=match) as caught:
        run.fit(path)
    assert "\n" not in str(caught.value)
    assert run.fake.spec is None
    assert run.module.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())


def test_other_prompts_are_refused(make_run, checkpoint):
    """Pitfall 109."""
    run = make_run(6, rollout=AHEAD, ppo_settings=OFF_POLICY, prompts=[{"prompt": f"^{c}b="} for c in "abcdefgh" * 3])
    assert_refused(run, checkpoint, "^the prompts differ from those of the checkpoint; resume with", run.weights())


def test_another_group_size_is_refused(make_run, checkpoint):
    run = make_run(6, rollout={**AHEAD, "num_generations_per_prompt": 3}, ppo_settings=OFF_POLICY)
    assert_refused(run, checkpoint, "num_generations_per_prompt=3 differs from the saved rollouts' 2", run.weights())


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


FILES = {
    "empty": lambda data: b"",
    "a few bytes": lambda data: data[:10],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one bit of a weight": lambda data: flip(data, len(data) // 2),
    "no checkpoint": lambda data: b"# notes\n" * 100,
}


@pytest.mark.parametrize("how", FILES)
def test_a_damaged_file_is_refused_and_the_previous_one_trains_on(make_run, tmp_path, how):
    """Pitfall 106."""
    older, newer = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    make_run(2, callbacks=[SaveWhen(older, 1), SaveWhen(newer, 2)]).fit()
    newer.write_bytes(FILES[how](newer.read_bytes()))
    run, steps = make_run(3), Steps()
    assert_refused(run, newer, r"ckpt_path=.*two\.ckpt is cut off or damaged \(.*; resume from an earlier", run.weights())
    resumed = make_run(3, callbacks=[steps])
    resumed.fit(older)
    assert sorted(steps.draws) == [1, 2]
    assert_each_once(resumed, steps, range(4))


def without(key):
    def change(rollouts):
        del rollouts[key]

    return change


def bit(rollouts):
    rollouts["payload"][len(rollouts["payload"]) // 2] ^= 1


def cut_payload(rollouts):
    rollouts["payload"] = rollouts["payload"][:-7].clone()


def other_draw(rollouts):
    rollouts["draws"][0] += 100


@pytest.mark.parametrize("change", [bit, cut_payload, other_draw, without("payload"), without("targets")])
def test_damaged_rollouts_refuse_the_whole_checkpoint(make_run, checkpoint, tmp_path, change):
    content = torch.load(checkpoint, weights_only=True)
    change(content[KEY]["prompts"]["rollouts"])
    bad = tmp_path / "bad.ckpt"
    torch.save(content, bad)
    settings = {"rollout": AHEAD, "ppo_settings": OFF_POLICY}
    run = make_run(4, **settings)
    assert_refused(run, bad, "^saved rollouts are damaged: .*; resume from an intact checkpoint, or set", run.weights())
    # the same objects take the intact one
    run.fit(checkpoint)
    assert run.trainer.global_step == 4
    steps = Steps()
    without_them = make_run(4, rollout={**AHEAD, "restore": "none"}, ppo_settings=OFF_POLICY, callbacks=[steps])
    without_them.fit(bad)
    assert_each_once(without_them, steps, range(8))


# ---------------------------------------------------------------- the journal


@pytest.fixture
def journaled(make_run, tmp_path):
    """A checkpoint after two steps beside the journal of two more; returns it, the journal, and a logger's maker."""
    path = tmp_path / "two.ckpt"
    run = make_run(4, callbacks=[SaveWhen(path, 2)], logger=CSVLogger(tmp_path, name="", version="logs"))
    run.fit()
    return path, tmp_path / "logs" / "journal"


def damage_middle(file):
    data = file.read_bytes()
    file.write_bytes(flip(data, len(data) // 2))


def test_damage_in_the_middle_of_the_journal_is_refused(make_run, journaled):
    path, journal = journaled
    damage_middle(journal / "step_000002.bin")
    run = make_run(4)
    assert_refused(run, path, r"step_000002\.bin.* is damaged at byte \d+; delete it, or set restore=none", run.weights())
    steps = Steps()
    other = make_run(4, rollout={"restore": "none"}, callbacks=[steps])
    other.fit(path)
    assert_each_once(other, steps, range(8))


@pytest.mark.parametrize("missing", [1, 30])
def test_a_torn_last_record_of_the_journal_is_generated_again(make_run, journaled, missing):
    """Of step 2, sampled by the restored policy, one group is cut off in mid-record."""
    path, journal = journaled
    file = journal / "step_000002.bin"
    file.write_bytes(file.read_bytes()[:-missing])
    saved = torch.load(path, weights_only=True)[KEY]["prompts"]["rollouts"]
    steps = Steps()
    run = make_run(4, callbacks=[steps])
    run.fit(path)
    again = {draw for draw in map(draw_of, run.fake.requests) if draw < 12}
    assert len(again) <= 1
    assert not again & set(saved["draws"][: saved["num_ready"]])
    assert steps.draws == {2: [8, 9, 10, 11], 3: [12, 13, 14, 15]}
    assert_each_once(run, steps, range(8))


def test_without_its_journal_a_checkpoint_is_enough(make_run, journaled):
    path, journal = journaled
    shutil.rmtree(journal)
    steps = Steps()
    run = make_run(4, callbacks=[steps])
    run.fit(path)
    assert_each_once(run, steps, range(8))


def test_the_journal_of_the_last_checkpoint_outlives_a_save_that_was_put_off(make_run, tmp_path):
    """A save inside a step writes nothing yet: it must not count as the checkpoint after the last one."""
    seen = []

    class SaveInside(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            if payload.chunk.ppo_step == 2 and payload.chunk.index == 0:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

        def on_ppo_step_end(self, trainer, pl_module, payload):
            seen.append(sorted(path.name for path in (tmp_path / "logs" / "journal").iterdir()))

    saves = [SaveWhen(tmp_path / f"{step}.ckpt", step) for step in (1, 2)]
    make_run(3, callbacks=[SaveInside(), *saves], logger=CSVLogger(tmp_path, name="", version="logs")).fit()
    # checkpoints 1 and 2 are on disk; 2 may be torn by no kill, but 1 might still be wanted
    assert "step_000001.bin" in seen[2]


def test_a_resumed_streaming_run_does_not_overwrite_its_checkpoint(make_run, tmp_path):
    """`ModelCheckpoint` would save step 2 once more after the first chunk of step 3, whose end that save waits for."""

    def saver():
        return ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")

    streaming = {"min_groups_for_streaming_train": 1, "max_inflight_prompts": 1}
    make_run(2, rollout=streaming, callbacks=[saver()], enable_checkpointing=True).fit()
    path = tmp_path / "saved" / "step=2.ckpt"
    content = path.read_bytes()
    fake = FakeEngine(delay_s=lambda request: 0.2 if draw_of(request) == 11 else 0.0)
    resumed = make_run(4, rollout=streaming, fake=fake, callbacks=[saver()], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        resumed.fit(path)
    assert {p.name for p in path.parent.iterdir()} == {"step=2.ckpt", "step=4.ckpt"}
    assert path.read_bytes() == content


# ---------------------------------------------------------------- failures inside the process


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("hook", ["on_chunk_ready", "on_chunk_end", "on_rollout_batch_complete", "on_before_policy_step"])
def test_unstepped_rows_are_trained_again_from_their_payload(make_run, cut, hook, step):
    """Before the policy's update nothing is lost: no response is sampled again, and the run ends as if unharmed."""

    def fail(self, trainer, pl_module, payload):
        if trainer.current_epoch == step and not self.failed:
            self.failed = True
            raise RuntimeError("boom")

    failing = type("Fails", (ppo.PPOCallback,), {hook: fail, "failed": False})()
    steps = Steps()
    # a second fit makes new optimizers, so that ones without a state are needed for equal weights
    run = make_run(3, rollout=cut(2, 2), module=SGD, callbacks=[failing, steps])
    with pytest.raises(RuntimeError, match="boom"):
        run.fit()
    before = len(run.fake.requests)
    held = run.data.position()["rollouts"]
    ready = held["draws"][: held["num_ready"]]
    assert set(ready) >= {4 * step, 4 * step + 1}
    run.fit()
    assert run.trainer.global_step == 3
    assert not {draw_of(request) for request in run.fake.requests[before:]} & set(ready)
    assert steps.draws == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}
    assert_each_once(run, steps, ())
    straight = make_run(3, rollout=cut(2, 2), module=SGD)
    straight.fit()
    assert all(torch.equal(tensor, run.weights()[name]) for name, tensor in straight.weights().items())


def test_the_file_is_written_beside_its_target(tmp_path, monkeypatch):
    """A temporary folder on another file system would make the last move a copy, which a kill can tear."""
    from lightning_ppo.checkpoint_io import WholeCheckpointIO

    moved = []
    monkeypatch.setattr("os.replace", lambda source, target: moved.append((Path(source), Path(target))))
    WholeCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "new" / "a.ckpt")
    assert moved == [(tmp_path / "new" / ".a.ckpt.part", tmp_path / "new" / "a.ckpt")]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    from lightning_ppo.checkpoint_io import WholeCheckpointIO

    path, files = tmp_path / "a.ckpt", WholeCheckpointIO()
    files.save_checkpoint({"a": 1}, path)
    with pytest.raises(AttributeError, match="local object"):
        files.save_checkpoint({"a": 2, "b": lambda: None}, f"file://{path}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert files.load_checkpoint(path, weights_only=True) == {"a": 1}
