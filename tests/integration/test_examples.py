"""The examples run as they stand, from the repository root."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_ppo as ppo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example():
    """The example's callback, imported without running the example."""
    spec = importlib.util.spec_from_file_location("custom_critic_epochs", ROOT / "examples/custom_critic_epochs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UntilTheLossStopsFalling


class Losses(ppo.PPOCallback):
    def __init__(self):
        self.passes = []

    def on_chunk_ready(self, trainer, pl_module, payload):
        self.passes.append([])

    def on_critic_epoch_end(self, trainer, pl_module, payload):
        self.passes[-1].append([stats.loss for stats in payload.stats])


def test_custom_critic_epochs_is_in_charge(make_run, example):
    """It trains as long as the loss falls, no matter what the settings say, and both models end at the same step."""
    losses = Losses()
    run = make_run(3, callbacks=[example(), losses], ppo_settings={"critic_ppo_epochs": 1})
    run.fit()
    for passes in losses.passes:
        assert 2 <= len(passes) <= 8
        assert all(len(stats) == 2 for stats in passes)
        whole = [stats[1] for stats in passes]
        falls = [later <= 0.98 * min(whole[: i + 1]) for i, later in enumerate(whole[1:])]
        assert all(falls[:-1])
        assert not falls[-1] or len(passes) == 8
    assert run.trainer.callback_metrics["critic/epochs"] == len(losses.passes[-1])
    assert int(run.module.critic.completed_steps) == run.trainer.global_step == 3


def test_custom_critic_epochs_takes_the_rows_that_it_missed_most(make_run, example):
    trained = []

    class Spy(ppo.PPOCallback):
        def on_refit_end(self, trainer, pl_module, payload):
            train_chunk = pl_module.critic_update.train_chunk

            def spy(rows, where):
                trained.append(rows)
                train_chunk(rows, where)

            pl_module.critic_update.train_chunk = spy

    make_run(1, callbacks=[example(), Spy()]).fit()
    hard, every = trained[:2]
    errors = {row.trajectory.sample_id: float((row.returns - row.values).abs().mean()) for row in every}
    assert len(errors) == 8
    assert sorted(errors[row.trajectory.sample_id] for row in hard) == sorted(errors.values())[4:]


def run_script(folder, script):
    (folder / "examples").symlink_to(ROOT / "examples")
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_custom_critic_epochs_runs(tmp_path):
    output = run_script(tmp_path, "examples/custom_critic_epochs.py")
    printed = ast.literal_eval(re.findall(r"^\{.*\}$", output, flags=re.MULTILINE)[-1])
    assert 2 <= printed["critic/epochs"] <= 8
    assert printed["critic/loss_last_epoch"] > 0


@pytest.mark.slow
def test_minimal_fit_runs(tmp_path):
    """As it stands but for the number of steps: no main guard, default optimizers, Lightning's own checkpoint."""
    source = (ROOT / "examples/minimal_fit.py").read_text()
    assert "max_epochs=60" in source
    (tmp_path / "minimal_fit.py").write_text(source.replace("max_epochs=60", "max_epochs=2"))
    run_script(tmp_path, "minimal_fit.py")
    assert [path.name for path in tmp_path.glob("lightning_logs/version_0/checkpoints/*")] == ["epoch=1-step=2.ckpt"]


def test_examples_are_short():
    for name in ("custom_critic_epochs.py", "minimal_fit.py"):
        assert len((ROOT / "examples" / name).read_text().splitlines()) < 40
