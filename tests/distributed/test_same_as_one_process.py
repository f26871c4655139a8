"""Two gloo ranks train what one process trains: gradients, weights, metrics, counters."""

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PLANNED = ["running", "batch", "regularized", "one_response"]
FULL_BATCH = ["ragged", "unequal", "masked_share"]


@pytest.fixture
def alone(runs, policy_folder, tmp_path):
    """The same run on one process, in one full batch."""

    def run(name, **arguments):
        return runs.build(name, policy_folder, tmp_path, devices=1, whole=True, **arguments).fit()

    return run


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    """Relative distance of two gradients."""
    return float((first - second).norm() / second.norm())


def assert_same_run(together, alone, *, first: float = 1e-6, later: float = 1e-5) -> None:
    """First-step gradients agree to rounding; later ones start from weights that already differ by it."""
    for model in ("policy", "critic"):
        assert len(together[model]) == len(alone[model]) > 0
        gaps = [gap(a, b) for a, b in zip(together[model], alone[model], strict=True)]
        assert gaps[0] <= first
        assert max(gaps) <= later
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    assert together["counters"] == alone["counters"]
    for (counts, metrics), (expected_counts, expected) in zip(together["steps"], alone["steps"], strict=True):
        # position 2 is the number of chunks
        assert counts[:2] + counts[3:] == expected_counts[:2] + expected_counts[3:]
        assert metrics.keys() == expected.keys()
        timed = ("time/", "throughput/", "step/chunks")
        names = [name for name in expected if not name.startswith(timed)]
        assert {n: metrics[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", PLANNED)
def test_streamed_on_two_ranks_equals_one_full_batch(pair, alone, name):
    assert_same_run(pair.seen(name), alone(name))


@pytest.mark.parametrize("name", FULL_BATCH)
def test_ragged_shares_equal_one_process(pair, alone, name):
    """Pitfalls 28, 34, 37, 40: shares of few and many tokens, and one without any trained token."""
    assert_same_run(pair.seen(name), alone(name))


def test_critic_minibatches_keep_ranks_together(pair):
    """Minibatches are shuffled per rank, so they differ from one process's; both ranks make the same updates."""
    first, second = pair.seen("minibatches", 0), pair.seen("minibatches", 1)
    # a minibatch that is masked on every rank is passed over by every rank
    assert 3 * 4 >= len(first["critic"]) == len(second["critic"]) > 3 * 2
    assert all(map(torch.equal, first["critic"], second["critic"]))


def test_shares_of_the_ragged_runs_are_what_they_are_meant_to_be(pair):
    for name, limit in (("unequal", 40), ("masked_share", 8)):
        for (*_, short), (*_, long) in zip(pair.seen(name, 0)["chunks"], pair.seen(name, 1)["chunks"], strict=True):
            assert (short, long) == (3, limit)
    for counts, metrics in pair.seen("masked_share")["steps"]:
        assert counts[3:] == (3, 1)
        assert metrics["rollout/masked_fraction"] == pytest.approx(8 / 11)


def test_several_epochs_and_validation_equal_one_process(pair, alone):
    """With a logger, and validation between the steps, which must disturb nothing."""
    together = pair.seen("checkpointed")
    assert_same_run(together, alone("full"), later=1e-3)
    assert together["steps"][1][1]["policy/approx_kl"] != 0


@pytest.mark.parametrize(
    "name", ["checkpointed", "resumed", *PLANNED, *FULL_BATCH, "minibatches", "heartbeat", "plain"]
)
def test_both_ranks_have_the_same_weights_and_metrics(pair, name):
    first, second = pair.seen(name, 0), pair.seen(name, 1)
    assert all(torch.equal(tensor, second["weights"][key]) for key, tensor in first["weights"].items())
    assert first["counters"] == second["counters"]
    for (counts, metrics), (other_counts, other) in zip(first["steps"], second["steps"], strict=True):
        assert counts == other_counts
        names = [n for n in metrics if not n.startswith(("time/", "throughput/"))]
        assert {n: metrics[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", ["running", "batch", "regularized", "one_response", "plain", "ragged"])
def test_every_sample_is_trained_once_by_one_rank(pair, runs, name):
    setup = runs.SETUPS[name]
    size, generations = setup.sizes["num_prompts_per_step"], setup.sizes["num_generations_per_prompt"]
    ranks = [pair.seen(name, rank)["chunks"] for rank in (0, 1)]
    for mine, theirs in zip(*ranks, strict=True):
        assert mine[:3] == theirs[:3]
        assert len(mine[3]) == len(theirs[3]) == len(mine[2]) * generations / 2
    for step in range(setup.steps):
        samples = [sample for chunks in ranks for s, _, _, ids, _ in chunks if s == step for sample in ids]
        draws = range(step * size, (step + 1) * size)
        assert sorted(samples) == sorted(f"draw{draw}_g{i}" for draw in draws for i in range(generations))


@pytest.mark.parametrize("name", PLANNED)
def test_steps_have_different_numbers_of_chunks(pair, runs, name):
    chunks = pair.seen(name)["chunks"]
    sizes = [tuple(len(c[2]) for c in chunks if c[0] == step) for step in range(runs.SETUPS[name].steps)]
    assert sizes == list(runs.SETUPS[name].plan)
    assert len({len(step) for step in sizes}) > 1


def test_one_response_per_prompt_goes_in_chunks_of_two_groups(pair):
    assert all(len(draws) % 2 == 0 for _, _, draws, _, _ in pair.seen("one_response")["chunks"])


def test_validation_and_prediction_are_the_same_on_both_ranks(pair):
    first, second = pair.seen("evaluated", 0), pair.seen("evaluated", 1)
    assert first == second
    assert len(first["predict"][0]) == 5
    rewards = [row["reward"] for row in first["predict"][0]]
    assert 0 < sum(rewards) / 5 < 1
    assert 0 < first["validate"][0]["val/reward_mean"] < 1
    during_fit = [pair.seen("checkpointed", rank)["validation"] for rank in (0, 1)]
    assert during_fit[0] == during_fit[1] == [first["validate"][0]["val/reward_mean"]] * 4


def test_waiting_longer_than_the_timeout_of_the_group_is_fine(pair):
    """Five seconds for rollouts and five for validation, where a silent group fails after four."""
    assert pair.seen("heartbeat", 1)["counters"] == (1, 1, 1)
    assert len(pair.seen("heartbeat", 1)["validation"]) == 1


class TestCheckpoints:
    """Saved on all ranks, in the middle of PPO step 1: written once, at the step's end."""

    def test_is_written_once_at_the_boundary(self, pair):
        assert pair.seen("checkpointed", 0)["writes"] == [
            (str(pair.folder / "mid.ckpt"), 2),
            (str(pair.folder / "end.ckpt"), 3),
        ]
        assert pair.seen("checkpointed", 1)["writes"] == []

    def test_holds_what_one_process_saves(self, pair, runs, alone, tmp_path):
        alone("full", callbacks=(runs.SaveMidStep(tmp_path / "mid.ckpt", step=1),))
        saved, expected = leaves(pair.folder / "mid.ckpt"), leaves(tmp_path / "mid.ckpt")
        assert saved.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)
            elif isinstance(value, float):
                assert saved[name] == pytest.approx(value, rel=1e-5), name
            else:
                assert saved[name] == value, name

    def test_goes_on_in_one_process(self, pair, runs, policy_folder, tmp_path):
        run = runs.build("full", policy_folder, tmp_path, devices=1)
        result = run.fit(pair.folder / "mid.ckpt")
        assert result["counters"] == (3, 3, 3)
        for name, tensor in pair.seen("checkpointed")["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)

    def test_resumes_bitwise_equal_on_runs(self, pair):
        whole, resumed = leaves(pair.folder / "end.ckpt"), leaves(pair.folder / "end_of_resumed.ckpt")
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            same = torch.equal(value, resumed[name]) if isinstance(value, torch.Tensor) else value == resumed[name]
            assert same, name


def leaves(path: Path) -> dict:
    """Every leaf of a checkpoint that matters for training."""

    def walk(value, place):
        if isinstance(value, dict):
            return {k: v for key in value for k, v in walk(value[key], f"{place}/{key}").items()}
        if isinstance(value, (list, tuple)):
            return {k: v for i, item in enumerate(value) for k, v in walk(item, f"{place}/{i}").items()}
        return {place: value}

    # where a run's files are, and which rollouts happen to be finished already, is no part of its training
    ignored = ("/loops/", "/callbacks/", "/lightning_ppo/prompts/rollouts/", "/lightning_ppo/prompts/journal")
    saved = torch.load(path, weights_only=True)
    return {k: v for k, v in walk(saved, "").items() if not k.startswith(ignored)}
