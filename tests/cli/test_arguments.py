"""Keys, their help, the shipped configs, and one line for everything that cannot be used."""

import argparse
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lightning_ppo import __version__
from lightning_ppo.cli import PPOCLI
from lightning_ppo.parser_messages import one_line
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.schedulers import LinearWarmupDecay

ROOT = Path(__file__).parents[2]
QUICKSTART = ("--config", str(ROOT / "configs/quickstart.yaml"))
OURS = ("model.", "data.", "samples.", "progress.", "checkpoint.")


@pytest.fixture(autouse=True)
def _repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def parsers():
    """The subcommands' parsers; building them takes a second."""

    class ParserOnly(PPOCLI):
        def before_instantiate_classes(self):
            pass

        def instantiate_classes(self):
            pass

    before = os.environ.get("PL_GLOBAL_SEED")
    cli = ParserOnly(["fit", *QUICKSTART])
    os.environ.pop("PL_GLOBAL_SEED", None)
    if before is not None:
        os.environ["PL_GLOBAL_SEED"] = before
    return cli._subcommand_parsers


def undocumented(parser):
    return [
        action.dest
        for action in parser._actions
        if action.dest.startswith(OURS) and action.help != argparse.SUPPRESS and not (action.help or "").strip()
    ]


@pytest.mark.parametrize("subcommand", ["fit", "validate", "predict"])
def test_every_key_is_documented(parsers, subcommand):
    parser = parsers[subcommand]
    keys = {action.dest for action in parser._actions}
    assert {f"data.rollout.{name}" for name in RolloutConfig.__dataclass_fields__} <= keys
    assert {"model.ppo.gamma", "data.local.slots", "samples.rows", "progress.every_n_steps"} <= keys
    assert undocumented(parser) == []


@pytest.mark.parametrize("subcommand", ["fit", "validate", "predict"])
def test_the_help_promises_no_checkpoint_that_is_refused(parsers, subcommand):
    (action,) = [action for action in parsers[subcommand]._actions if action.dest == "ckpt_path"]
    assert "`last`" in action.help
    assert not {"best", "registry"} & set(re.findall(r"\w+", action.help))


def test_the_check_for_documentation_can_fail(parsers):
    parser = type(parsers["fit"])()
    parser.add_argument("--model.mystery", type=int)
    assert undocumented(parser) == ["model.mystery"]


def test_subcommands_are_ours(parsers, command):
    assert list(parsers) == ["fit", "validate", "predict"]
    outcome = command("--help")
    assert outcome.code == 0
    assert "export" in outcome.out
    outcome = command("test")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_the_version_is_printed(command):
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"lightning-ppo {__version__}\n")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("gamma", "gamma is no setting; did you mean model.ppo.gamma?"),
        ("model.ppo.gama", "model.ppo.gama is no setting; did you mean model.ppo.gamma?"),
        ("data.num_servers", "data.num_servers is no setting; did you mean data.vllm.num_servers?"),
        ("nonsense", "nonsense is no setting; --help of a subcommand lists all"),
        # there are too many of this name
        ("init_args", "init_args is no setting; --help of a subcommand lists all"),
    ],
)
def test_an_unknown_key_is_named_with_its_neighbours(command, key, message):
    outcome = command("fit", "--config", str(ROOT / "configs/quickstart.yaml"), f"--{key}", "1")
    assert (outcome.code, outcome.err) == (2, f"error: {message}\n")


def test_missing_settings_are_named_as_they_are_given(command, tmp_path):
    outcome = command("fit")
    missing = "model.policy, data.prompts, data.reward are missing; give them"
    assert (outcome.code, outcome.err) == (2, f"error: {missing}\n")
    (tmp_path / "x.yaml").write_text("{model: {policy: examples/tiny_policy}, data: {prompts: x}}")
    outcome = command("validate", "--config", str(tmp_path / "x.yaml"))
    assert (outcome.code, outcome.err) == (2, "error: data.reward is missing; give it\n")


def test_an_unknown_key_of_a_file_is_named_too(command, tmp_path):
    (tmp_path / "x.yaml").write_text("model: {policy: examples/tiny_policy, ppo: {gama: 1}}")
    outcome = command("fit", "--config", str(tmp_path / "x.yaml"))
    message = "model.ppo.gama is no setting; did you mean model.ppo.gamma?"
    assert (outcome.code, outcome.err) == (2, f"error: {message}\n")


@pytest.mark.parametrize("name", ["quickstart", "offset"])
def test_shipped_config_builds(name):
    path = ROOT / f"configs/{name}.yaml"
    assert len(path.read_text().splitlines()) <= 25
    cli = PPOCLI(["fit", "--config", str(path), "--seed_everything", "3"])
    assert cli.datamodule.run_seed == 3
    assert cli.trainer.logger.name == name
    assert cli.trainer.checkpoint_callback.every_n_epochs == 0
    assert cli.trainer.max_epochs >= 100
    optimizers, schedulers = cli.model.configure_optimizers()
    assert isinstance(optimizers[0], torch.optim.AdamW)
    assert optimizers[0].defaults["betas"] == (0.9, 0.99)
    assert isinstance(schedulers[0]["scheduler"], LinearWarmupDecay)


def test_seed_and_stop_tokens_reach_the_rollouts():
    arguments = ["fit", *QUICKSTART, "--trainer.logger", "false", "--data.rollout.stop_token_ids", "[1, 2]"]
    data = PPOCLI([*arguments, "--seed_everything", "4", "--data.rollout.seed", "9"]).datamodule
    assert (data.run_seed, data.rollout.stop_token_ids) == (9, (1, 2))
    data = PPOCLI(["fit", *QUICKSTART, "--data.rollout.stop_token_ids", "null"]).datamodule
    assert (data.run_seed, data.rollout.stop_token_ids) == (0, None)


def test_arguments_of_the_strategy_are_settings():
    given = ["--trainer.strategy", "StreamingPPOStrategy", "--trainer.strategy.timeout", "0:00:30"]
    assert PPOCLI(["fit", *QUICKSTART, *given]).trainer.strategy._timeout == timedelta(seconds=30)


def test_own_callbacks_replace_the_defaults():
    given = [
        *("--trainer.callbacks+", "lightning_ppo.callbacks.SampleTable"),
        *("--trainer.callbacks.rows", "3"),
        *("--trainer.callbacks+", "lightning.pytorch.callbacks.TQDMProgressBar"),
    ]
    cli = PPOCLI(["fit", *QUICKSTART, *given, "--trainer.enable_checkpointing", "false"])
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.count("SampleTable") == 1
    assert "PPOProgressBar" not in names
    assert "StepCheckpoint" not in names


BAD = [
    (["--model.ppo.clip_eps", "-1"], "clip_eps=-1.0 is out of range; set a finite number > 0 and <= 1"),
    (["--model.ppo.clip_eps", "abc"], "model.ppo.clip_eps=abc does not fit; give float"),
    (["--model.ppo.clipeps", "3"], "model.ppo.clipeps is no setting; did you mean model.ppo.clip_eps"),
    (["--data.rollout.stop_token_ids", "x"], "data.rollout.stop_token_ids=x does not fit; give tuple or null"),
    (
        ["--model.policy_optimizer", "torch.optim.AdamWW"],
        "model.policy_optimizer=torch.optim.AdamWW does not fit; module 'torch.optim' has no attribute 'AdamWW'\n",
    ),
    (
        ["--model.policy_optimizer.init_args.lrr", "3"],
        "model.policy_optimizer=torch.optim.AdamW does not fit; lrr is no argument of it; did you mean lr?\n",
    ),
    (
        ["--model.policy_optimizer.init_args.eps", "[1]"],
        "model.policy_optimizer=torch.optim.AdamW does not fit; eps=[1] does not fit; give float\n",
    ),
    (
        ["--model.policy_scheduler.init_args.warmup", "3"],
        "warmup is no argument of it; it has final_fraction, total_steps, warmup_steps\n",
    ),
    (
        ["--trainer.callbacks+", "lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks+=EarlyStopping"],
        "trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping does not fit; monitor is missing; give it\n",
    ),
    (
        ["--trainer.callbacks", "[nowhere.Callback]"],
        "trainer.callbacks=nowhere.Callback does not fit; No module named 'nowhere'\n",
    ),
    (
        ["--trainer.strategy", "StreamingPPOStrategy", "--trainer.strategy.timeout", "x"],
        "trainer.strategy=lightning_ppo.StreamingPPOStrategy does not fit; timeout=x does not fit; give string",
    ),
    (["--model.policy", "nowhere"], "policy=nowhere is not a Hugging Face folder"),
    (["--data.local.device", "cuda:99"], "local.device=cuda:99 is not among the "),
    (["--data.prompts", "nowhere.jsonl"], "prompts: nowhere.jsonl cannot be read"),
    (["--data.reward", "nowhere.py:f"], "reward=nowhere.py:f does not exist"),
    (["--config", "nowhere.yaml"], "/nowhere.yaml does not exist; give the path of a YAML file\n"),
    (["--config", "tests"], "/tests is no file; give the path of a YAML file\n"),
    (
        ["--data.vllm", "[1]"],
        "data.vllm=[1] does not fit; give its settings one by one as data.vllm.NAME, or a file of",
    ),
    (
        ["--model.critic_optimizer.lr", "1e-3"],
        "model.critic_optimizer has arguments, but no class; give model.critic_optimizer=AdamW too, or another one\n",
    ),
    (
        ["--model.critic_scheduler.warmup_steps", "3"],
        "model.critic_scheduler has arguments, but no class; give model.critic_scheduler=lightning_ppo.schedulers.Lin",
    ),
    (["--data.rollout.failures", "null"], "data.rollout.failures=null does not fit; give its settings one by one as"),
    (["--seed_everything", "abc"], "seed_everything=abc does not fit; give bool or int\n"),
    (["--seed_everything", "-1"], "seed_everything=-1 is out of range; set a whole number from 0 to 4294967295\n"),
    (["--seed_everything", "4294967296"], "seed_everything=4294967296 is out of range; "),
    (["--trainer.max_epoch", "8"], "trainer.max_epoch is no setting; did you mean trainer.max_epochs"),
    (["--ckpt_path", "last"], "/quickstart; give the path of a checkpoint\n"),
    (["--ckpt_path", "best"], "ckpt_path=best means nothing to a run that begins; give the path, or last\n"),
    (["--data.validation_prompts", "nowhere.jsonl"], "validation_prompts: nowhere.jsonl cannot be read"),
    (["--ckpt_path", "nowhere.ckpt"], "ckpt_path=nowhere.ckpt does not exist"),
    (["--ckpt_path", "tests"], "ckpt_path=tests is a folder; give the path of a checkpoint\n"),
    (["--ckpt_path", "README.md"], "ckpt_path=README.md is no checkpoint of lightning_ppo"),
    (["--trainer.default_root_dir", "README.md/x"], "trainer.default_root_dir=README.md/x cannot be made (Not a dir"),
    (["--trainer.gradient_clip_algorithm", "norm"], "trainer.gradient_clip_algorithm=norm is not supported"),
    (["--trainer.strategy", "ddp"], "strategy=DDPStrategy cannot run PPO steps"),
    (["--trainer.strategy", "nothing"], "invalid strategy name"),
    (["--trainer.precision", "16-mixed"], "trainer.precision=16-mixed changes its loss scale"),
    (["--trainer.max_steps", "5"], "trainer.max_steps=5 is not supported"),
    (["--model.ppo.ppo_epochs", "2"], "ppo_epochs=2 needs the whole step at once"),
    (
        ["--trainer.callbacks", "lightning.pytorch.callbacks.OnExceptionCheckpoint", "--trainer.callbacks.dirpath=x"],
        "trainer.callbacks=OnExceptionCheckpoint would save in the middle of a PPO step",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_setting_is_one_line(command, tmp_path, arguments, message):
    outcome = command("fit", *QUICKSTART, "--trainer.default_root_dir", str(tmp_path), *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("subcommand", ["validate", "predict"])
def test_evaluation_needs_validation_prompts(command, subcommand):
    outcome = command(subcommand, *QUICKSTART, "--data.validation_prompts", "null")
    assert outcome.code == 2
    assert outcome.err == (
        f"error: data.validation_prompts=None leaves nothing to {subcommand}; give a jsonl file of prompts\n"
    )


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("some\n  thing else", "some thing else"),
        ('Parser key "config": no file', "config: no file"),
        (
            "Parser key \"a.b\":\n  Does not validate against any of the Union subtypes\n  Subtypes: [<class 'int'>, "
            "<class 'NoneType'>]\n  Errors:\n    - Expected a <class 'int'>\n    - Expected a <class 'NoneType'>\n"
            "  Given value type: <class 'str'>\n  Given value: x y",
            "a.b=x y does not fit; give int or null",
        ),
        (
            "Parser key \"k\":\n  Expected a typing.Literal['a', 'b']. Got value: c",
            "k=c does not fit; give one of 'a', 'b'",
        ),
    ],
)
def test_parser_messages_become_one_line(message, line):
    assert one_line(message) == line
