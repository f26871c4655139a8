"""`fit --replay-schedule FILE`, from the recorded run's own settings."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_ppo.cli import PPOCLI

ROOT = Path(__file__).parents[2]

ASYNCHRONOUS = (
    *("--config", "configs/quickstart.yaml"),
    *("--trainer.max_epochs", "5"),
    *("--trainer.check_val_every_n_epoch", "5"),
    *("--trainer.num_sanity_val_steps", "0"),
    *("--model.ppo.importance_correction", "truncated"),
    *("--model.ppo.normalize_advantages", "chunk"),
    *("--data.rollout.num_prompts_per_step", "4"),
    *("--data.rollout.num_generations_per_prompt", "2"),
    *("--data.rollout.min_groups_for_streaming_train", "1"),
    *("--data.rollout.max_lookahead_versions", "1"),
    *("--data.rollout.in_flight_weight_updates", "false"),
    *("--data.rollout.timeout_s", "60"),
)


def exported(command, run, target):
    """The parameters of a run's last checkpoint, as `export` writes them."""
    outcome = command("export", str(run / "checkpoints/last.ckpt"), str(target))
    assert (outcome.code, outcome.err) == (0, "")
    return {
        f"{model}/{name}": tensor
        for model in ("policy", "critic")
        for name, tensor in load_file(target / model / "model.safetensors").items()
    }


@pytest.mark.slow
def test_a_run_is_repeated_from_its_schedule(command, tmp_path):
    outcome = command("fit", *ASYNCHRONOUS, "--trainer.default_root_dir", str(tmp_path / "runs"))
    assert (outcome.code, outcome.err) == (0, "")
    first, again = (tmp_path / f"runs/quickstart/version_{version}" for version in (0, 1))
    schedule = str(first / "schedule.jsonl")
    slots = ("--data.local.slots", "5")
    outcome = command("fit", "--config", str(first / "config.yaml"), "--replay-schedule", schedule, *slots)
    assert (outcome.code, outcome.err) == (0, "")
    one, other = exported(command, first, tmp_path / "first"), exported(command, again, tmp_path / "again")
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not tensor.equal(other[name])] == []
    lines = [(run / "schedule.jsonl").read_text().splitlines()[1:] for run in (first, again)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 5

    # another reward; and further than the recording goes
    (tmp_path / "reward.py").write_text("def reward(response):\n    return 7.0\n")
    replay = ("--config", str(first / "config.yaml"), "--replay-schedule", schedule)
    outcome = command("fit", *replay, "--data.reward", f"{tmp_path}/reward.py:reward")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "first differs at draw " in outcome.err
    assert "of PPO step 0: rewards differ;" in outcome.err
    outcome = command("fit", *replay, "--trainer.max_epochs", "6")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "set trainer.max_epochs=5" in outcome.err


def test_the_short_name_is_the_setting(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    class ParserOnly(PPOCLI):
        def before_instantiate_classes(self):
            pass

        def instantiate_classes(self):
            pass

    for given in (["--replay-schedule", "x.jsonl"], ["--replay-schedule=x.jsonl"]):
        cli = ParserOnly(["fit", "--config", "configs/quickstart.yaml", *given])
        assert cli.config.fit.data.rollout.replay_schedule == "x.jsonl"
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def test_the_short_name_is_in_the_help_of_fit_only(command):
    outcome = command("fit", "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "--data.rollout.replay_schedule REPLAY_SCHEDULE, --replay-schedule REPLAY_SCHEDULE" in outcome.out
    outcome = command("validate", "--config", "configs/quickstart.yaml", "--replay-schedule", "x.jsonl")
    assert outcome.code == 2
    assert outcome.err == "error: replay-schedule is no setting; --help of a subcommand lists all\n"


def test_a_schedule_that_cannot_be_read_is_one_line(command, tmp_path):
    path = tmp_path / "schedule.jsonl"
    arguments = ("fit", *ASYNCHRONOUS, "--trainer.default_root_dir", str(tmp_path), "--replay-schedule", str(path))
    outcome = command(*arguments)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"error: replay_schedule={path} cannot be read (")
    step = '{"ppo_step": %d, "chunks": [[0, 1, 2, 3]]}\n'
    path.write_text(step % 0 + '{"ppo_\n' + step % 2)
    outcome = command(*arguments)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"error: {path} line 2: ")
