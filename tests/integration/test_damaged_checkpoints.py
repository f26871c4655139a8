"""Damaged, torn and foreign checkpoints and journals: one line, nothing is loaded, and the previous one trains on."""

import shutil

import pytest
import torch
from draws import draw_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError
from lightning_ppo.testing import FakeEngine

OFF_POLICY = {"importance_correction": "truncated"}
AHEAD = {"max_lookahead_versions": 2, "max_trajectory_age_steps": 2}
KEY = "lightning_ppo"


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


@pytest.mark.parametrize("change", ["shape", "missing", "surplus"])
def test_other_models_are_refused(make_run, checkpoint, tmp_path, change):
    content = torch.load(checkpoint, weights_only=True)
    weights = content["state_dict"]
    name = next(name for name in weights if name.endswith("norm.weight"))
    expected = f"{name} is only here"
    if change == "shape":
        expected = rf"{name} is \[7\] there and \[\d+\] here"
        weights[name] = torch.zeros(7)
    elif change == "missing":
        del weights[name]
    else:
        weights["policy.surplus"], expected = torch.zeros(1), "policy.surplus is only there"
    other = tmp_path / "other.ckpt"
    torch.save(content, other)
    run = make_run(6, rollout=AHEAD, ppo_settings=OFF_POLICY)
    assert_refused(run, other, rf"^ckpt_path holds other models \({expected}\); set model.policy", run.weights())


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
def test_a_damaged_file_is_refused_and_the_previous_one_trains_on(
    make_run, tmp_path, how, steps, save_when, assert_each_once
):
    """Pitfall 106."""
    older, newer = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    make_run(2, callbacks=[save_when(older, 1), save_when(newer, 2)]).fit()
    newer.write_bytes(FILES[how](newer.read_bytes()))
    run = make_run(3)
    assert_refused(
        run, newer, r"ckpt_path=.*two\.ckpt is cut off or damaged \(.*; resume from an earlier", run.weights()
    )
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
def test_damaged_rollouts_refuse_the_whole_checkpoint(make_run, checkpoint, tmp_path, change, steps, assert_each_once):
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
    without_them = make_run(4, rollout={**AHEAD, "restore": "none"}, ppo_settings=OFF_POLICY, callbacks=[steps])
    without_them.fit(bad)
    assert_each_once(without_them, steps, range(8))


# ---------------------------------------------------------------- the journal


@pytest.fixture
def journaled(make_run, tmp_path, save_when):
    """A checkpoint after two steps beside the journal of two more; returns it, the journal, and a logger's maker."""
    path = tmp_path / "two.ckpt"
    run = make_run(4, callbacks=[save_when(path, 2)], logger=CSVLogger(tmp_path, name="", version="logs"))
    run.fit()
    return path, tmp_path / "logs" / "journal"


def damage_middle(file):
    data = file.read_bytes()
    file.write_bytes(flip(data, len(data) // 2))


def test_damage_in_the_middle_of_the_journal_is_refused(make_run, journaled, steps, assert_each_once):
    path, journal = journaled
    damage_middle(journal / "step_000002.bin")
    run = make_run(4)
    assert_refused(
        run, path, r"step_000002\.bin.* is damaged at byte \d+; delete it, or set restore=none", run.weights()
    )
    other = make_run(4, rollout={"restore": "none"}, callbacks=[steps])
    other.fit(path)
    assert_each_once(other, steps, range(8))


@pytest.mark.parametrize("missing", [1, 30])
def test_a_torn_last_record_of_the_journal_is_generated_again(make_run, journaled, missing, steps, assert_each_once):
    """Of step 2, sampled by the restored policy, one group is cut off in mid-record."""
    path, journal = journaled
    file = journal / "step_000002.bin"
    file.write_bytes(file.read_bytes()[:-missing])
    saved = torch.load(path, weights_only=True)[KEY]["prompts"]["rollouts"]
    run = make_run(4, callbacks=[steps])
    run.fit(path)
    again = {draw for draw in map(draw_of, run.fake.requests) if draw < 12}
    assert len(again) <= 1
    assert not again & set(saved["draws"][: saved["num_ready"]])
    assert steps.draws == {2: [8, 9, 10, 11], 3: [12, 13, 14, 15]}
    assert_each_once(run, steps, range(8))


def test_without_its_journal_a_checkpoint_is_enough(make_run, journaled, steps, assert_each_once):
    path, journal = journaled
    shutil.rmtree(journal)
    run = make_run(4, callbacks=[steps])
    run.fit(path)
    assert_each_once(run, steps, range(8))


def test_the_journal_of_the_last_checkpoint_outlives_a_save_that_was_put_off(make_run, tmp_path, save_when):
    """A save inside a step writes nothing yet, so that it is not the checkpoint before the one that follows."""
    seen = []

    class SaveInside(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            if payload.chunk.ppo_step == 2:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(sorted(path.name for path in (tmp_path / "logs" / "journal").iterdir()))

    saves = [SaveInside(), save_when(tmp_path / "1.ckpt", 1)]
    make_run(3, callbacks=saves, logger=CSVLogger(tmp_path, name="", version="logs")).fit()
    # had a kill torn the save of step 3, the run would go on from step 1
    assert (tmp_path / "inside.ckpt").exists()
    assert {"step_000001.bin", "step_000002.bin"} <= set(seen[2])


def test_a_resumed_streaming_run_does_not_overwrite_its_checkpoint(make_run, tmp_path):
    """`ModelCheckpoint` would save step 2 once more after its first chunk, and that save waits for the step's end."""

    def saver():
        return ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")

    class LetGo(ppo.PPOCallback):
        def on_chunk_end(self, trainer, pl_module, payload):
            late.let_go()

    # in both runs: step 2 does not come as a single chunk
    late, streaming = FakeEngine(holds=lambda request: draw_of(request) == 11), {"min_groups_for_streaming_train": 1}
    make_run(2, rollout=streaming, fake=late, callbacks=[saver()], enable_checkpointing=True).fit()
    path = tmp_path / "saved" / "step=2.ckpt"
    content = path.read_bytes()
    late = FakeEngine(holds=lambda request: draw_of(request) == 11)
    resumed = make_run(4, rollout=streaming, fake=late, callbacks=[saver(), LetGo()], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        resumed.fit(path)
    assert {p.name for p in path.parent.iterdir()} == {"step=2.ckpt", "step=4.ckpt"}
    assert path.read_bytes() == content
