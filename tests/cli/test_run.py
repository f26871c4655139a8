"""The command line from fit to export on the quickstart's files, and how a run ends that does not succeed."""

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

import lightning_ppo as ppo
from lightning_ppo.callbacks import SampleTable

ROOT = Path(__file__).parents[2]

SMALL = (
    *("--config", "configs/quickstart.yaml"),
    *("--trainer.max_epochs", "5"),
    *("--trainer.check_val_every_n_epoch", "5"),
    *("--trainer.num_sanity_val_steps", "0"),
    *("--data.rollout.num_prompts_per_step", "4"),
    *("--data.rollout.num_generations_per_prompt", "2"),
    *("--data.rollout.min_groups_for_streaming_train", "2"),
    *("--data.rollout.timeout_s", "60"),
    *("--checkpoint.every_n_train_steps", "2"),
    *("--samples.every_n_steps", "2"),
    *("--progress.every_n_steps", "2"),
)


@pytest.fixture(scope="module")
def fitted(command, tmp_path_factory):
    """A finished run: what was printed, and its folder."""
    root = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    outcome = command("fit", *SMALL, "--trainer.default_root_dir", str(root))
    torch.set_num_threads(threads)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome, root / "quickstart/version_0"


def test_fit_says_what_happens(fitted):
    outcome, folder = fitted
    lines = outcome.out.splitlines()
    assert lines[0].startswith("policy 388 k, critic 383 k parameters; 4 x 2 responses per PPO step, streaming; seed 0")
    assert lines[1] == "starting the generation engine ..."
    steps = [line.split(":")[0] for line in lines[2:-1]]
    assert steps == ["PPO step 1/5", "PPO step 2/5", "PPO step 4/5", "PPO step 5/5"]
    assert lines[-1] == (
        f"finished 5 PPO steps; files in {folder}: TensorBoard events, checkpoints, config.yaml, train.log, "
        "engine.log, schedule.jsonl, samples.md"
    )


def test_run_folder_has_everything(fitted):
    _, folder = fitted
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["last.ckpt", "ppo_step=2.ckpt", "ppo_step=4.ckpt", "ppo_step=5.ckpt"]
    assert (folder / "checkpoints/last.ckpt").resolve().name == "ppo_step=5.ckpt"
    log = (folder / "train.log").read_text()
    assert "train_pump: step 4 closing on" in log
    assert logging.getLogger("lightning_ppo").handlers == []
    assert (folder / "samples.md").read_text().count("## PPO step") == 3
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = events.Tags()["scalars"]
    prefixes = {name.split("/")[0] for name in scalars}
    assert {"policy", "critic", "rollout", "time", "val"} <= prefixes
    assert {"rollout/reward_mean", "policy/approx_kl", "critic/explained_variance", "time/wait_s"} <= set(scalars)
    for name in scalars:
        if not name.startswith(("val/", "epoch", "hp_metric")):
            assert [event.step for event in events.Scalars(name)] == [0, 1, 2, 3, 4], name
    assert [event.step for event in events.Scalars("val/reward_mean")] == [4]
    assert [event.step for event in events.Tensors("samples/text_summary")] == [0, 1, 3]


def test_validate_and_predict_use_the_checkpoint(fitted, command, tmp_path):
    _, folder = fitted
    arguments = (
        *SMALL,
        "--trainer.default_root_dir",
        str(tmp_path),
        "--ckpt_path",
        str(folder / "checkpoints/last.ckpt"),
    )
    outcome = command("validate", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    printed = dict(line.split(" ") for line in outcome.out.splitlines())
    assert sorted(printed) == ["val/response_length", "val/reward_mean", "val/truncated_fraction"]
    outcome = command("predict", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    path = Path(outcome.out.split()[-1])
    assert path.parent.parent.parent == tmp_path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    prompts = [json.loads(line) for line in (ROOT / "examples/sort_validation.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in prompts]
    assert all(len(row["response_ids"]) == len(row["logprobs"]) > 0 for row in rows)
    # both are greedy with the same weights
    assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(float(printed["val/reward_mean"]), abs=1e-4)


def test_export_writes_the_policy_of_the_checkpoint(fitted, command, tmp_path):
    _, folder = fitted
    checkpoint = str(folder / "checkpoints/last.ckpt")
    outcome = command("export", checkpoint, str(tmp_path / "out"))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"wrote {tmp_path}/out/policy and {tmp_path}/out/critic\n"
    module = ppo.PPOModule(str(ROOT / "examples/tiny_policy"))
    before = module.policy.model(torch.arange(8)[None]).logits
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    expected = module.policy.model(torch.arange(8)[None]).logits
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out/policy")(torch.arange(8)[None]).logits
    assert torch.equal(exported, expected)
    assert not torch.equal(exported, before)
    outcome = command("export", checkpoint, str(tmp_path / "out"), "--policy", "examples/tiny_policy")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "is there already" in outcome.err


def test_failing_reward_is_one_line_and_a_traceback_in_the_log(command, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompt, response, answer):\n    raise KeyError('boom')\n")
    arguments = ("--data.reward", f"{tmp_path}/reward.py:reward", "--trainer.default_root_dir", str(tmp_path))
    outcome = command("fit", *SMALL, *arguments)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: reward reward failed: KeyError: 'boom' (prompt row ")
    log = tmp_path / "quickstart/version_0/train.log"
    assert outcome.err.endswith(f"(traceback in {log})\n")
    assert "Traceback (most recent call last)" in log.read_text()
    assert "raise KeyError('boom')" in log.read_text()


def test_resume_goes_on_where_it_ended_and_interrupt_ends_with_130(fitted, command, tmp_path, monkeypatch):
    _, folder = fitted

    def interrupt(self, trainer, pl_module, payload):
        if payload.ppo_step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(SampleTable, "on_ppo_step_end", interrupt)
    handler = signal.getsignal(signal.SIGINT)
    # the saved settings are a config themselves
    arguments = ("--config", str(folder / "config.yaml"), "--trainer.max_epochs", "9")
    last = str(folder / "checkpoints/last.ckpt")
    try:
        outcome = command("fit", *arguments, "--ckpt_path", last, "--trainer.logger.save_dir", str(tmp_path))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "PPO step 6/9" in outcome.out
    assert "PPO step 4/9" not in outcome.out
    assert outcome.code == 130
    written = tmp_path / "quickstart/version_0/checkpoints"
    assert sorted(path.name for path in written.iterdir()) == ["last.ckpt", "ppo_step=6.ckpt"]
    assert outcome.err == f"stopped: interrupted after 7 PPO step(s); resume with --ckpt_path {written}/last.ckpt\n"


def test_the_last_checkpoint_of_all_runs_is_found(fitted, command, tmp_path):
    """Every run has a folder of its own, in which Lightning finds none and would begin anew."""
    _, folder = fitted
    for arguments in (
        ("--trainer.default_root_dir", str(folder.parents[1])),
        ("--config", str(folder / "config.yaml")),
    ):
        outcome = command("fit", *SMALL, *arguments, "--ckpt_path", "last")
        assert (outcome.code, outcome.err) == (0, "")
        assert "PPO step 1" not in outcome.out
        assert "finished 5 PPO steps" in outcome.out


def test_an_error_of_a_callback_is_one_line_and_a_traceback_in_the_log(command, tmp_path):
    """`EarlyStopping` raises a RuntimeError, which says nothing of whose fault it is."""
    stop = ("--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "rewrd")
    outcome = command("fit", *SMALL, *stop, "--trainer.default_root_dir", str(tmp_path))
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert outcome.err.startswith("error: RuntimeError: Early stopping conditioned on metric `rewrd`")
    log = tmp_path / "quickstart/version_0/train.log"
    assert outcome.err.endswith(f"(traceback in {log})\n")
    assert "Traceback (most recent call last)" in log.read_text()


INTERRUPTED_IMPORT = """
import runpy, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "lightning.pytorch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
runpy.run_module("lightning_ppo", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_while_everything_is_imported():
    result = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


@pytest.mark.slow
def test_sigterm_ends_with_143(tmp_path):
    command = [sys.executable, "-m", "lightning_ppo", "fit", *SMALL, "--trainer.max_epochs", "-1"]
    process = subprocess.Popen(
        [*command, "--trainer.default_root_dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.startswith("PPO step 2:"):
                process.terminate()
                break
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert errors.startswith("stopped: SIGTERM after ")
    assert errors.count("\n") == 1
