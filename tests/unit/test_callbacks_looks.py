"""What a run shows and writes down: progress, samples, scalars, logs, the last checkpoint."""

import html
import io
import logging
import re
from types import SimpleNamespace

import lightning as L
import markdown
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ppo.batch import StepBatch, TrainRow
from lightning_ppo.callbacks import (
    CheckpointExclusion,
    PPOProgressBar,
    RunLog,
    SampleTable,
    StepCheckpoint,
    use_ppo_progress_bar,
)
from lightning_ppo.callbacks.samples import escape_markdown, spread
from lightning_ppo.errors import ConfigError, RewardError
from lightning_ppo.hooks import PPOCallback, PPOStepEnd
from lightning_ppo.testing import char_tokenizer, make_prompt, make_trajectory

STREAM = {"min_groups_for_streaming_train": 1}


class StopAt(PPOCallback):
    """Ends a run without an end."""

    def __init__(self, step):
        self.step = step

    def on_ppo_step_end(self, trainer, pl_module, payload):
        trainer.should_stop = payload.ppo_step == self.step


class Terminal(io.StringIO):
    def isatty(self):
        return True


# ---------------------------------------------------------------------- progress


def test_lines_without_a_terminal(make_run, capsys):
    run = make_run(5, callbacks=[PPOProgressBar(2)], enable_progress_bar=True, rollout=STREAM)
    run.fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PPO step")]
    assert [line.split(":")[0] for line in lines] == [f"PPO step {step}/5" for step in (1, 2, 4, 5)]
    pattern = r"reward \d\.\d{3} \(mean of 2: \d\.\d{3}\), \d\.\d chunks and \d+\.\d\d s per step "
    pattern += r"\(wait \d+%, value \d+%, policy \d+%, critic \d+%, refit \d+%\)"
    assert re.search(pattern, lines[1])


def test_long_runs_do_not_flood_a_log():
    bar = PPOProgressBar(10)
    due = [step for step in range(1, 100_001) if bar._is_due(step)]
    assert due[:3] == [10, 20, 30]
    assert len(due) < 300
    assert due[-2:] == [99_000, 100_000]


@pytest.mark.parametrize(("steps", "shown"), [(3, "3/3"), (-1, "3")])
def test_bar_on_a_terminal(make_run, monkeypatch, steps, shown):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    prompts = [{"prompt": "^ab="}]
    run = make_run(steps, callbacks=[PPOProgressBar(), StopAt(3)], enable_progress_bar=True, validation_prompts=prompts)
    run.fit()
    last = terminal.getvalue().rstrip().splitlines()[-1].split("\r")[-1]
    assert last.startswith(f"PPO step {shown} ") or last.startswith(f"PPO step {shown},")
    assert re.search(r"chunk 0, groups 4/4, reward \d\.\d{3} \(mean of 3: \d\.\d{3}\), val \d\.\d{3}, wait \d+% ", last)
    assert ("00:0" in last) == (steps == 3)


def test_resumed_bar_starts_where_the_run_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    bar = PPOProgressBar()
    bar.on_train_start(SimpleNamespace(global_step=40, max_epochs=100), None)
    bar.on_exception(None, None, RuntimeError())
    assert "PPO step 40/100" in terminal.getvalue()
    bar.on_train_end(SimpleNamespace(global_step=40, max_epochs=100), None)


def test_disabled_bar_is_silent(make_run, capsys):
    bar = PPOProgressBar(1)
    bar.disable()
    make_run(2, callbacks=[bar], enable_progress_bar=True).fit()
    assert "PPO step" not in capsys.readouterr().out


class OwnBar(TQDMProgressBar):
    pass


@pytest.mark.parametrize(
    ("bar", "is_swapped"),
    [
        (None, True),
        (RichProgressBar(), True),
        (TQDMProgressBar(), True),
        (RichProgressBar(leave=True), False),
        (TQDMProgressBar(refresh_rate=7), False),
        (OwnBar(), False),
        (PPOProgressBar(3), False),
    ],
)
def test_default_bar_is_swapped_and_a_chosen_one_is_not(tmp_path, bar, is_swapped):
    chosen = [] if bar is None else [bar]
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=chosen)
    before = trainer.progress_bar_callback
    use_ppo_progress_bar(trainer)
    after = trainer.progress_bar_callback
    assert (after is not before) == is_swapped
    assert not is_swapped or type(after) is PPOProgressBar
    use_ppo_progress_bar(trainer)
    assert trainer.progress_bar_callback is after


def test_no_bar_stays_no_bar(tmp_path):
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, enable_progress_bar=False)
    use_ppo_progress_bar(trainer)
    assert trainer.progress_bar_callback is None


@pytest.mark.parametrize("build", [lambda: PPOProgressBar(0), lambda: SampleTable(-1), lambda: SampleTable(rows=0)])
def test_bad_settings_are_rejected(build):
    with pytest.raises(ConfigError, match="is not a valid count"):
        build()


# ---------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    "text", ["a|b", "*bold* _it_ `code`", "<b>&amp;</b>", "[x](y) ~~z~~", "\\n \\| $x$ #1 - 2.", "1\n2\r\n3\u20284"]
)
def test_escaped_text_shows_as_it_is_in_a_table(text):
    table = f"| a | b |\n|---|---|\n| {escape_markdown(text)} | end |\n"
    cells = re.findall(r"<td>(.*?)</td>", markdown.markdown(table, extensions=["tables"]), re.DOTALL)
    assert len(cells) == 2
    assert html.unescape(cells[0]) == re.sub("\r\n|[\n\u2028]", "↵", text)


def test_rows_are_spread_over_the_rewards():
    rows = [make_trajectory(f"draw{i}_g0", reward=float(i % 10)) for i in range(30)]
    chosen = spread(rows, 4)
    assert [row.reward for row in chosen] == [9, 6, 3, 0]
    assert spread(list(reversed(rows)), 4) == chosen
    assert [row.reward for row in spread(rows, 1)] == [9]
    assert spread(rows[:2], 8) == [rows[1], rows[0]]


def _step_end(step, rows):
    batch = StepBatch(step - 1, tuple(TrainRow(row, *[row.response_mask] * 4) for row in rows), 1, 1, 1)
    return PPOStepEnd(step, batch, {})


def test_long_texts_are_cut_and_the_table_has_every_column(tmp_path):
    row = make_trajectory(prompt_ids=make_prompt(token_ids=(2, 4, 7, 3)).token_ids, reward=0.25, truncated=True)
    row = make_trajectory("draw1_g0", row.prompt_ids.tolist(), [6] * 50, reward=0.25, truncated=True)
    table = SampleTable(max_characters=10).table([row], char_tokenizer())
    assert table.splitlines()[2] == f"| 0.25 | 50 | length | ^&#124;b= | {'a' * 5} … {'a' * 5} |"


@pytest.mark.parametrize(("is_zero", "files"), [(True, ["samples.md"]), (False, [])])
def test_only_rank_zero_writes(tmp_path, is_zero, files):
    trainer = SimpleNamespace(loggers=[object()], log_dir=str(tmp_path), is_global_zero=is_zero)
    SampleTable(2).on_ppo_step_end(
        trainer, SimpleNamespace(tokenizer=char_tokenizer()), _step_end(4, [make_trajectory()])
    )
    assert [path.name for path in tmp_path.iterdir()] == files


def test_samples_and_scalars_in_tensorboard(make_run, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", default_hp_metric=False)
    run = make_run(4, callbacks=[SampleTable(2, rows=3)], logger=logger, rollout=STREAM)
    run.fit()
    text = (tmp_path / "run/version_0/samples.md").read_text()
    assert re.findall(r"## PPO step (\d)", text) == ["1", "2", "4"]
    assert text.count("| stop |") + text.count("| length |") == 9
    events = EventAccumulator(str(tmp_path / "run/version_0"))
    events.Reload()
    assert [event.step for event in events.Tensors("samples/text_summary")] == [0, 1, 3]
    names = set(events.Tags()["scalars"])
    assert {f"time/{phase}_s" for phase in ("wait", "value", "policy", "critic", "refit", "step", "overhead")} <= names
    assert {"rollout/reward_mean", "rollout/response_length", "rollout/policy_age_mean"} <= names
    assert {"rollout/token_mult_prob_error", "policy/loss", "policy/lr"} <= names
    assert {"critic/loss", "critic/explained_variance", "throughput/response_tokens_per_s"} <= names
    for name in names - {"epoch"}:
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2, 3], name


def test_without_a_logger_nothing_is_written(make_run, tmp_path):
    make_run(1, callbacks=[SampleTable(1), RunLog()]).fit()
    assert not list(tmp_path.rglob("samples.md"))
    assert not list(tmp_path.rglob("train.log"))


# ---------------------------------------------------------------------- logs and checkpoints


def test_log_lines_go_to_the_file_and_not_to_the_console(make_run, tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path, name="run", default_hp_metric=False)
    log = RunLog()
    # the pretended engine's log-probs are far off, which a run without correction warns of
    settings = {"critic_warmup_steps": 1, "critic_minibatches": 2, "importance_correction": "truncated"}
    make_run(2, callbacks=[log], logger=logger, ppo_settings=settings).fit()
    lines = (tmp_path / "run/version_0/train.log").read_text().splitlines()
    assert log.path == tmp_path / "run/version_0/train.log"
    assert [re.sub(r"\d\.\d+ s", "T s", line.split("INFO ")[1]) for line in lines] == [
        "train_pump: step 0 chunk 0: 4 group(s), 4/4 dispatched",
        "train_pump: step 0 closing on 1 chunk(s), 4 group(s)",
        "refit: policy version 1 is served after T s (only the number is new)",
        "critic: step 0: 8 row(s), 1 epoch(s), 2 update(s)",
        "critic warm-up is complete after 1 step(s): the policy is trained from now on",
        "train_pump: step 1 chunk 0: 4 group(s), 4/4 dispatched",
        "train_pump: step 1 closing on 1 chunk(s), 4 group(s)",
        "refit: policy version 2 is served after T s (new weights)",
        "critic: step 1: 8 row(s), 1 epoch(s), 2 update(s)",
    ]
    captured = capsys.readouterr()
    assert "train_pump" not in captured.out + captured.err
    assert logging.getLogger("lightning_ppo").level == logging.NOTSET


def test_traceback_of_a_failure_is_in_the_log(make_run, tmp_path):
    def reward(prompt, response):
        raise ZeroDivisionError("here")

    logger = TensorBoardLogger(tmp_path, name="run", default_hp_metric=False)
    run = make_run(2, callbacks=[RunLog()], logger=logger, reward=reward)
    with pytest.raises(RewardError):
        run.fit()
    text = (tmp_path / "run/version_0/train.log").read_text()
    assert 'raise ZeroDivisionError("here")' in text
    assert logging.getLogger("lightning_ppo").handlers == []


def test_last_step_is_saved_and_resumes(make_run, tmp_path):
    def checkpoint(folder):
        return StepCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")

    run = make_run(5, callbacks=[checkpoint("saved"), CheckpointExclusion()], enable_checkpointing=True)
    run.fit()
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert (tmp_path / "saved/last.ckpt").resolve().name == "step=5.ckpt"
    longer = make_run(6, callbacks=[checkpoint("again")], enable_checkpointing=True)
    longer.fit(tmp_path / "saved/last.ckpt")
    assert longer.trainer.global_step == longer.trainer.current_epoch == 6
    straight = make_run(6)
    straight.fit()
    for name, tensor in straight.weights().items():
        assert tensor.equal(longer.weights()[name]), name
