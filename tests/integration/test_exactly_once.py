"""Real `kill -9`, at every phase of a PPO step: every prompt is trained exactly once over any number of restarts."""

import signal
import statistics
from collections import Counter

import pytest

P, G = 4, 2
HOOKS = (
    "on_chunk_ready",
    "on_chunk_end",
    "on_rollout_batch_complete",
    "on_before_policy_step",
    "on_policy_update_end",
    "on_before_refit",
    "on_refit_end",
    "on_critic_epoch_end",
    "on_ppo_step_end",
)
# the checkpoint before it is of step 2: one complete step is lost besides the one that is killed
KILLS = {
    **{hook: {"hook": hook, "step": 3} for hook in HOOKS},
    "waiting": {"wait": 3},
    "writing": {"write": 4, "where": "middle"},
    "written": {"write": 4, "where": "end"},
}
IN_ORDER, AHEAD = {"max_lookahead_versions": 0}, {"max_lookahead_versions": 1}
READY_FIRST = {"sampler": "ready_first", "max_lookahead_versions": 1}
MODES = {
    "in_order": {"rollout": IN_ORDER},
    "in_order, journal": {"rollout": IN_ORDER, "logs": "logs"},
    "ahead": {"rollout": AHEAD},
    "ahead, journal": {"rollout": AHEAD, "logs": "logs"},
    "ready_first": {"rollout": READY_FIRST},
    "ready_first, journal": {"rollout": READY_FIRST, "logs": "logs"},
}
EVERYWHERE = ("in_order, journal", "ahead", "ready_first, journal")
SOME = ("on_chunk_end", "on_refit_end", "waiting")
CASES = [(mode, kill) for mode in MODES for kill in KILLS if mode in EVERYWHERE or kill in SOME]


def draws_of(steps):
    return [draw for step in steps for chunk in step["chunks"] for draw in chunk]


def samples_by_step(steps):
    return {row["step"]: sorted(row["samples"]) for row in steps}


def assert_exactly_once(history, whole):
    """Nothing twice, nothing lost; with target steps, every step trained what the uninterrupted run did."""
    steps = history.survivors()
    assert [row["step"] for row in steps] == list(range(history.job["steps"])), history.output()
    trained = draws_of(steps)
    assert len(trained) == len(set(trained)) == history.job["steps"] * P
    end = history.end()
    assert sorted(trained) == sorted({*range(end["stream"]["cursor"]), *end["stream"]["trained"]})
    assert end["stream"]["num_trained"] == len(trained)
    everything = sorted([*trained, *end["draws"]])
    assert everything == list(range(len(everything))), "a prompt was passed over"
    if history.job["rollout"].get("sampler") is None:
        assert samples_by_step(steps) == samples_by_step(whole)
        assert sorted(p for row in steps for p in row["prompts"]) == sorted(p for row in whole for p in row["prompts"])


@pytest.fixture(scope="session")
def uninterrupted(begin_history):
    """Steps of the run that nothing happened to, by rollout settings."""
    done = {}

    def find(job):
        key = str(job)
        if key not in done:
            history = begin_history(**job)
            assert history.run() == 0, history.output()
            done[key] = history.survivors()
            assert_exactly_once(history, done[key])
        return done[key]

    return find


@pytest.mark.parametrize(("mode", "kill"), CASES)
def test_killed_anywhere(begin_history, uninterrupted, mode, kill):
    history = begin_history(**MODES[mode])
    assert history.run(kill=KILLS[kill]) in (-signal.SIGKILL, -signal.SIGXFSZ), history.output()
    lost = [row["step"] for row in history.steps(0)]
    assert lost == ([0, 1, 2, 3] if kill in ("on_ppo_step_end", "writing", "written") else [0, 1, 2])
    assert [step for step, _ in history.checkpoints()] == [2], "the checkpoint being written is there, or the last not"
    assert history.run() == 0, history.output()
    assert_exactly_once(history, uninterrupted({"rollout": MODES[mode]["rollout"]}))


@pytest.mark.parametrize("folders", [("logs", "logs", "logs"), ("a", "b", "c")])
@pytest.mark.parametrize("rollout", [AHEAD, READY_FIRST])
@pytest.mark.parametrize("second", [("on_before_policy_step", 3), ("on_critic_epoch_end", 4)])
def test_killed_twice(begin_history, uninterrupted, rollout, folders, second):
    """Once more before, or after, the resumed run has written a checkpoint of its own."""
    history = begin_history(rollout=rollout, steps=5)
    hook, step = second
    assert history.run(logs=folders[0], kill=KILLS["on_refit_end"]) == -signal.SIGKILL, history.output()
    assert history.run(logs=folders[1], kill={"hook": hook, "step": step}) == -signal.SIGKILL, history.output()
    assert history.run(logs=folders[2]) == 0, history.output()
    assert [start for _, start in history.runs] == [0, 2, 2 if step == 3 else 4]
    assert_exactly_once(history, uninterrupted({"rollout": rollout, "steps": 5}))


@pytest.mark.parametrize("where", ["middle", "end"])
def test_killed_while_the_only_checkpoint_is_overwritten(begin_history, uninterrupted, where):
    """Pitfall 106: one file name for all checkpoints, so that a torn write would leave none."""
    history = begin_history(rollout=AHEAD, only_last=True, steps=5)
    assert history.run(kill={"write": 4, "where": where}) in (-signal.SIGKILL, -signal.SIGXFSZ), history.output()
    assert [step for step, _ in history.checkpoints()] == [2]
    assert history.run() == 0, history.output()
    assert [step for step, _ in history.checkpoints()] == [4]
    assert_exactly_once(history, uninterrupted({"rollout": AHEAD, "steps": 5}))


@pytest.mark.parametrize("journal", [True, False])
def test_what_the_journal_holds_is_not_generated_again(begin_history, uninterrupted, journal):
    """Of the two steps after the checkpoint one was sampled from its policy, the other from a newer one."""
    history = begin_history(rollout=IN_ORDER, after_save=True, **({"logs": "logs"} if journal else {}))
    for _ in range(2):
        assert history.run(kill=KILLS["on_rollout_batch_complete"]) == -signal.SIGKILL, history.output()
    assert history.run() == 0, history.output()
    again = [*([] if journal else range(8, 12)), *range(12, 16)]
    assert Counter(history.requested(1)) == Counter(G * again)
    assert Counter(draw for draw in history.requested(2) if draw < 16) == Counter(G * again)
    assert_exactly_once(history, uninterrupted({"rollout": IN_ORDER}))


@pytest.mark.parametrize("settings", [{}, {"logs": "logs"}, {"restore": "drop_incomplete"}])
def test_the_batch_after_a_resume_is_not_biased_to_short_responses(begin_history, settings):
    """Pitfall 98: long responses take long, so that what is finished at a kill is short."""
    settings = dict(settings)
    rollout = {**AHEAD, **({"restore": settings.pop("restore")} if "restore" in settings else {})}
    job = {"rollout": rollout, "long_are_slow": True}
    whole, history = begin_history(**job), begin_history(**job, **settings)
    assert whole.run() == 0, whole.output()
    assert history.run(kill={"hook": "on_chunk_end", "step": 2}) == -signal.SIGKILL, history.output()
    assert history.run() == 0, history.output()
    assert_exactly_once(history, whole.survivors())
    first, expected = history.steps(1)[0], whole.steps(0)[2]
    assert first["step"] == expected["step"] == 2
    assert sorted(first["prompts"]) == sorted(expected["prompts"])
    assert first["length"] == expected["length"]
    # the test would be empty if the group that was missing at the kill were like the others
    lengths = {}
    for sample, versions in zip(expected["samples"], expected["versions"], strict=True):
        lengths.setdefault(sample.split("_")[0], []).append(len(versions))
    *others, longest = sorted(map(sum, lengths.values()))
    assert longest > 1.4 * statistics.mean(others)
