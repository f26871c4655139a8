"""PPOParser: the command line's keys that are not arguments of the trainer, the module or the data module."""

import os
import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_ppo.callbacks import PPOProgressBar, SampleTable, StepCheckpoint
from lightning_ppo.parser_messages import one_line, unknown_argument, unknown_setting
from lightning_ppo.settings_file import check_file


class PPOParser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # the beginning of a name would be taken for the name, and a misspelt key for another one
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            # this one parses the arguments of a class; the parser that asked names the key
            argument = re.fullmatch(r"Option '([\w.-]+)' is not accepted", message)
            super().error(unknown_argument(argument[1], self._settings()) if argument else message, ex)
        given = re.search(r"unrecognized arguments: --([\w.-]+)", message)
        in_file = re.search(r"Subcommand '(\w+)' does not accept option '([\w.-]+)'", message)
        if given:
            message = unknown_setting(given[1], self._settings())
        elif in_file:
            subcommands: Any = self._subcommands_action
            message = unknown_setting(in_file[2], subcommands.choices[in_file[1]]._settings())
        self.exit(2, f"error: {one_line(message)}\n")

    @override
    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        # a remote one is left to jsonargparse
        if os.path.isfile(cfg_path):
            check_file(os.fspath(cfg_path), [key for key in self._settings() if not key.endswith(".help")])
        return super().parse_path(cfg_path, *args, **kwargs)

    def _settings(self) -> list[str]:
        options = (option for option in self._option_string_actions if option.startswith("--"))
        return [option.removeprefix("--") for option in options if option != "--help"]


def add_callback_arguments(parser: LightningArgumentParser) -> None:
    """Add the sections `checkpoint`, `samples` and `progress`: callbacks that every run has."""
    parser.add_lightning_class_args(StepCheckpoint, "checkpoint")
    parser.add_lightning_class_args(SampleTable, "samples")
    parser.add_lightning_class_args(PPOProgressBar, "progress")
    parser.set_defaults(
        {
            "checkpoint.filename": "ppo_step={step}",
            "checkpoint.auto_insert_metric_name": False,
            "checkpoint.every_n_train_steps": 25,
            "checkpoint.save_top_k": -1,
            # a link instead of a second copy
            "checkpoint.save_last": "link",
        }
    )


def add_short_name(parser: LightningArgumentParser, key: str, name: str) -> None:
    """Have `--name` mean `--key`, in the help as well.

    Args:
        parser: A subcommand's parser.
        key: A key that it has.
        name: Another name for it; config files know `key` only.
    """
    action = next(action for action in parser._actions if action.dest == key)
    # the parser shares its table of options with its groups
    parser._option_string_actions[f"--{name}"] = action
    action.option_strings = [*action.option_strings, f"--{name}"]


def explain_checkpoint(parser: LightningArgumentParser) -> None:
    """Have the help of a subcommand say what `--ckpt_path` takes here.

    Lightning's own promises a `best` and a registry, which a run that begins does not have.
    """
    action = next(action for action in parser._actions if action.dest == "ckpt_path")
    newest = "`last` is the newest `last.ckpt` of the runs of this name"
    action.help = f"Checkpoint of a run, which `fit` goes on with; {newest}."


def export_parser(description: str) -> PPOParser:
    """Build the parser of `export`."""
    parser = PPOParser(usage="lightning-ppo export CKPT DIR [--policy FOLDER]", description=description)
    parser.add_argument("ckpt", type=str, help="Checkpoint of a run.")
    parser.add_argument("directory", type=str, help="Where to write policy/ and critic/; new or empty.")
    parser.add_argument("--policy", type=str | None, help="The run's policy folder, if it has moved since.")
    return parser
