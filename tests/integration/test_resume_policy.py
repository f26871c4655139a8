"""What a resumed run keeps of the rollouts in its checkpoint, and a run that goes on after a failure."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from draws import draw_of

import lightning_ppo as ppo

SGD = {f"{name}_optimizer": partial(torch.optim.SGD, lr=0.1) for name in ("policy", "critic")}
OFF_POLICY = {"importance_correction": "truncated"}
AHEAD = {"max_lookahead_versions": 2, "max_trajectory_age_steps": 2}


# ---------------------------------------------------------------- other settings than those of the checkpoint

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
    # nothing corrects for what older policies sampled, however old it may be
    "on policy": ({"max_lookahead_versions": 0}, ALL, SAME),
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
def test_what_is_kept_and_what_is_generated_again(make_run, checkpoint, name, caplog, steps, assert_each_once):
    changes, again, expected = POLICIES[name]
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
def test_rollouts_of_another_sampler_are_generated_again(
    make_run, checkpoint, sampler, caplog, steps, assert_each_once
):
    run = make_run(6, rollout={**AHEAD, "sampler": sampler}, ppo_settings=OFF_POLICY, callbacks=[steps])
    with caplog.at_level(logging.WARNING, logger="lightning_ppo"):
        run.fit(checkpoint)
    assert f"generated again: they were drawn by sampler=in_order, this run has {sampler}" in caplog.text
    assert Counter(map(draw_of, run.fake.requests)).items() >= ALL.items()
    assert_each_once(run, steps, range(8))


# ---------------------------------------------------------------- failures inside the process


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "hook", ["on_chunk_ready", "on_chunk_end", "on_rollout_batch_complete", "on_before_policy_step"]
)
def test_unstepped_rows_are_trained_again_from_their_payload(make_run, cut, hook, step, steps, assert_each_once):
    """Before the policy's update nothing is lost: no response is sampled again, and the run ends as if unharmed."""

    def fail(self, trainer, pl_module, payload):
        if trainer.current_epoch == step and not self.failed:
            self.failed = True
            raise RuntimeError("boom")

    failing = type("Fails", (ppo.PPOCallback,), {hook: fail, "failed": False})()
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
