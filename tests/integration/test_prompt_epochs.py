"""Prompts without end: every epoch in an order of its own, over restarts too; PPO steps alone are the limit."""

import lightning as L
import pytest

import lightning_ppo as ppo
from lightning_ppo.testing import CHARACTERS

OFF_POLICY = {"importance_correction": "truncated"}
LETTERS = "abcdefghijkl"


class Rows(ppo.PPOCallback):
    """The prompts of every step, in draw order; saves after every step if there is a folder."""

    def __init__(self, folder=None):
        self.prompts, self.folder = [], folder

    def on_ppo_step_end(self, trainer, pl_module, payload):
        chosen = {int(row.trajectory.sample_id.split("_")[0][4:]): row.trajectory for row in payload.batch.rows}
        self.prompts += [CHARACTERS[chosen[draw].prompt_ids[1]] for draw in sorted(chosen)]

    def on_train_epoch_end(self, trainer, pl_module):
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def train(make_run, size, steps, seed=3, ahead=0, resume=None, folder=None):
    rows = Rows(folder)
    run = make_run(
        steps,
        prompts=[{"prompt": f"^{letter}="} for letter in LETTERS[:size]],
        rollout={"seed": seed, "max_lookahead_versions": ahead},
        ppo_settings=OFF_POLICY,
        callbacks=[rows],
    )
    run.fit(resume)
    assert run.trainer.global_step == run.trainer.current_epoch == steps
    return rows.prompts


def test_every_epoch_is_a_new_order_from_the_seed(make_run):
    """Pitfall 79: one and a half batches of prompts, four steps."""
    prompts = train(make_run, size=6, steps=4)
    first, second = prompts[:6], prompts[6:12]
    assert len(prompts) == 16
    assert sorted(first) == sorted(second) == list(LETTERS[:6])
    assert len(set(prompts[12:])) == 4
    assert first != second
    assert train(make_run, size=6, steps=4) == prompts
    assert train(make_run, size=6, steps=4, seed=4) != prompts


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_few_steps_over_few_prompts(make_run, steps, ahead):
    """Pitfall 88, and fewer prompts than one step takes."""
    for size in (3, 6):
        assert len(train(make_run, size=size, steps=steps, ahead=ahead)) == 4 * steps


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("size", [4, 6, 8])
def test_interrupted_order_equals_uninterrupted(make_run, tmp_path, size, ahead):
    """Pitfalls 94, 95 and 103: two epochs and more; with 4 and 8 prompts some stops are at the end of an epoch."""
    whole = train(make_run, size=size, steps=5, ahead=ahead, folder=tmp_path)
    for stop in (1, 2, 3):
        rest = train(make_run, size=size, steps=5, ahead=ahead, resume=tmp_path / f"{stop}.ckpt")
        assert whole[: 4 * stop] + rest == whole


def seeds(run):
    """What a run's shuffles, its ledger and its rollouts' seeds come from."""
    position = run.data.position()
    return run.module.seed, position["stream"]["seed"], position["fingerprint"].split(" seed=")[1].split()[0]


def test_seed_is_lightnings_when_the_run_begins(make_run):
    run = make_run(1)
    L.seed_everything(7, verbose=False)
    run.fit()
    assert seeds(run) == (7, 7, "7")
    fixed = make_run(1, rollout={"seed": 5})
    fixed.fit()
    assert seeds(fixed) == (5, 5, "5")


def test_another_fit_goes_on_with_the_seed_of_its_run(make_run):
    """A new trainer's run is a new one."""
    L.seed_everything(7, verbose=False)
    run, other = make_run(1, validation_prompts=[{"prompt": "^a="}]), make_run(1)
    run.fit()
    L.seed_everything(8, verbose=False)
    other.trainer.validate(run.module, run.data, verbose=False)
    assert run.module.seed == 8
    run.trainer.fit_loop.max_epochs = 2
    run.fit()
    assert seeds(run) == (7, 7, "7")
    assert run.data.position()["stream"]["cursor"] == 8
    other.trainer.fit(run.module, run.data)
    assert seeds(run) == (8, 8, "8")
