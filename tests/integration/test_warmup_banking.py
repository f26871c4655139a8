"""Critic warm-up banking through the whole loop: how far generation runs ahead; nothing is wasted or too old."""

import time
from collections import Counter

import pytest
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.rollout.schedule import Schedule

W, A, L, P, G, STEPS = 4, 1, 4, 4, 2, 9
ROLLOUT = {
    "max_lookahead_versions": A,
    "max_trajectory_age_steps": A,
    "warmup_generation_lead_steps": L,
    "timeout_s": 15.0,
}
PPO = {"critic_warmup_steps": W, "importance_correction": "truncated"}
LEADS = {0: 4, 1: 4, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1}
"""behaviour.md 3.2."""
DISPATCHED = {0: [0, 1, 2, 3, 4], 1: [5], 2: [], 3: [], 4: [], 5: [6], 6: [7], 7: [8]}
"""Batches of each version by that table: those up to version + lead that no earlier version dispatched."""


class Watch(ppo.PPOCallback):
    """Ages of every step; what exists, trained or not, when a step is over; saves after `save_after` steps."""

    def __init__(self, save_after=None, path=None):
        self.ages, self.draws, self.ahead = [], {}, {}
        self.save_after, self.path = save_after, path

    def on_ppo_step_end(self, trainer, pl_module, payload):
        self.ages.append([payload.metrics[f"rollout/{kind}_age_max"] for kind in ("policy", "version")])
        ids = {row.trajectory.sample_id for row in payload.batch.rows}
        self.draws[payload.ppo_step - 1] = sorted({int(name.split("_")[0][4:]) for name in ids})

    def on_train_epoch_end(self, trainer, pl_module):
        step = trainer.global_step
        if step not in LEADS:
            return
        # everything that version `step` may dispatch, finished
        wanted = P * LEADS[step] + P
        deadline = time.monotonic() + 15
        while (held := pl_module.rollouts.position()["rollouts"])["num_ready"] < wanted:
            assert time.monotonic() < deadline, (step, held)
            time.sleep(0.005)
        self.ahead[step] = max(held["draws"]) // P - step
        if step == self.save_after:
            trainer.save_checkpoint(self.path)


def build(make_run, tmp_path, watch, steps=STEPS, **rollout):
    logger = CSVLogger(tmp_path, name="", version="logs")
    return make_run(steps, rollout={**ROLLOUT, **rollout}, ppo_settings=PPO, callbacks=[watch], logger=logger)


def groups_of(tmp_path):
    """Start version of every trained draw, from the run's schedule."""
    steps = Schedule.load(tmp_path / "logs" / "schedule.jsonl").steps.values()
    return {group.draw: group.start_version for step in steps for group in step.groups}


def assert_sound(watch, first=0):
    policy_ages, version_ages = zip(*watch.ages, strict=True)
    assert max(policy_ages) == A
    assert all(age == 0 for age in policy_ages[: max(0, W + 1 - first)])
    assert max(version_ages) <= L
    assert watch.draws == {step: list(range(P * step, P * step + P)) for step in range(first, STEPS)}


@pytest.mark.parametrize("minimum", [1, P])
def test_leads_ages_and_nothing_wasted(make_run, tmp_path, minimum):
    watch = Watch()
    run = build(make_run, tmp_path, watch, min_groups_for_streaming_train=minimum)
    run.fit()
    assert_sound(watch)
    assert max(age for _, age in watch.ages) == L
    assert watch.ahead == {step: LEADS[step] for step in range(1, 8)}
    version_of = {batch: version for version, batches in DISPATCHED.items() for batch in batches}
    assert groups_of(tmp_path) == {draw: version_of[draw // P] for draw in range(P * STEPS)}
    # no discard at the transition: every response was sampled once
    requests = Counter(int(request.request_id.split("_")[0][4:]) for request in run.fake.requests)
    assert set(requests.values()) == {G}


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_resume_keeps_the_bank(make_run, tmp_path, stop):
    """In the middle of warm-up, at its end, and right after."""
    path = tmp_path / "stop.ckpt"
    build(make_run, tmp_path / "first", Watch(stop, path), steps=stop).fit()
    watch = Watch()
    resumed = build(make_run, tmp_path / "second", watch)
    resumed.fit(path)
    assert_sound(watch, first=stop)
    assert watch.ahead == {step: LEADS[step] for step in range(stop + 1, 8)}
    banked = range(P * (stop + LEADS[stop] + 1))
    requests = Counter(int(request.request_id.split("_")[0][4:]) for request in resumed.fake.requests)
    assert not set(requests) & set(banked)
    assert set(requests.values()) == {G}
    again = {draw: version for draw, version in groups_of(tmp_path / "second").items() if draw in banked}
    assert max(again.values()) <= stop
