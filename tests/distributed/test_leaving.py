"""When something goes wrong on one of two ranks, both leave: soon, with the error, and nothing stays behind."""

import os
import signal

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_in_the_middle_of_training_ends_both_together(pair, rank):
    """Lightning's own handler would start a broadcast in the middle of our collectives."""
    mine, theirs = pair.seen(f"sigterm_{rank}", 0), pair.seen(f"sigterm_{rank}", 1)
    assert mine["code"] == theirs["code"] == 143
    assert [chunk[:3] for chunk in mine["chunks"]] == [chunk[:3] for chunk in theirs["chunks"]]
    # signalled in the first chunk of step 1, they left before the second
    assert mine["chunks"][-1][:2] == (1, 0)


def test_loss_that_is_not_finite_on_one_rank_fails_the_step_on_both(pair):
    """Both still have the weights of the last boundary, and neither waits for the other in a collective."""
    first, second = pair.seen("non_finite", 0), pair.seen("non_finite", 1)
    assert "policy loss is nan in PPO step 1 chunk 0" in second["error"]
    assert "draw" in second["error"]
    assert first["error"]
    assert first["counters"] == second["counters"] == (1, 1, 1)
    assert len(first["policy"]) == len(second["policy"]) == 1
    assert all(torch.equal(tensor, second["weights"][name]) for name, tensor in first["weights"].items())


def test_failing_reward_ends_both_ranks_with_its_error(start):
    pair = start("bad_reward")
    assert pair.wait() == 1
    for rank in (0, 1):
        assert pair.error(rank).startswith("RewardError: reward ")
        assert "no reward today" in pair.error(rank)


@pytest.mark.parametrize(
    ("action", "error"),
    [
        # in the set-up, when a checkpoint is loaded, and at the end of a step: nobody waits in a collective of rank 0's
        ("unrepeatable", "DataError: replay_schedule=nowhere.jsonl cannot be read ("),
        ("other_prompts", "CheckpointError: the prompts differ from those of the checkpoint; resume with the same "),
        ("unwritable", "RolloutError: schedule="),
    ],
)
def test_error_of_what_rank_0_does_alone_is_that_of_both(start, action, error):
    pair = start(action)
    assert pair.wait() == 1
    first, second = (pair.error(rank) for rank in (0, 1))
    assert first == second
    assert first.startswith(error)
    assert "\n" not in first


def test_steps_that_ranks_cannot_share_are_refused_on_both(start):
    pair = start("odd")
    assert pair.wait() == 1
    for rank in (0, 1):
        assert pair.error(rank).startswith("ConfigError: num_prompts_per_step=3 does not divide into chunks of 2 ")
        assert "\n" not in pair.error(rank)


def test_sigterm_to_rank_0_while_it_waits_ends_both(start):
    """Lightning's launcher passes the signal on to rank 1, which hears from rank 0 when to leave."""
    pair = start("stuck")
    pair.until((pair.folder / "waiting").exists, "no request for rollouts")
    pair.process.send_signal(signal.SIGTERM)
    assert pair.wait() == 143
    assert [pair.error(rank) for rank in (0, 1)] == ["SIGTERMException: 143"] * 2


def test_death_of_rank_1_ends_rank_0(start):
    """Its next heartbeat fails; unless Lightning's observer, which looks every 5 s, has killed rank 0 before."""
    pair = start("stuck")
    pair.until((pair.folder / "waiting").exists, "no request for rollouts")
    os.kill(pair.pid(1), signal.SIGKILL)
    code = pair.wait()
    assert code in (1, -signal.SIGKILL)
    if code == 1:
        assert "onnection" in pair.error(0)
