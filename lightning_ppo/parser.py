"""PPOParser: the command line's keys that are not arguments of the trainer, the module or the data module."""

import re
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_ppo.callbacks import PPOProgressBar, SampleTable, StepCheckpoint
from lightning_ppo.console import one_line


class PPOParser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        given = re.search(r"unrecognized arguments: --([\w.-]+)", message)
        in_file = re.search(r"Subcommand '(\w+)' does not accept option '([\w.-]+)'", message)
        if given:
            message = _unknown(given[1], self)
        elif in_file:
            subcommands: Any = self._subcommands_action
            message = _unknown(in_file[2], subcommands.choices[in_file[1]])
        self.exit(2, f"error: {one_line(message)}\n")


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


def export_parser(description: str) -> PPOParser:
    """Build the parser of `export`."""
    parser = PPOParser(usage="lightning-ppo export CKPT DIR [--policy FOLDER]", description=description)
    parser.add_argument("ckpt", type=str, help="Checkpoint of a run.")
    parser.add_argument("directory", type=str, help="Where to write policy/ and critic/; new or empty.")
    parser.add_argument("--policy", type=str | None, help="The run's policy folder, if it has moved since.")
    return parser


def _unknown(key: str, parser: LightningArgumentParser) -> str:
    name = key.rpartition(".")[2]
    section = key.removesuffix(name)
    keys = sorted(option.removeprefix("--") for option in parser._option_string_actions)
    # most mistakes leave out the sections, or misspell the last name
    found = [other for other in keys if other.rpartition(".")[2] == name]
    if not found:
        names = [other.removeprefix(section) for other in keys if other.rpartition(".")[0] == section[:-1]]
        found = [section + near for near in get_close_matches(name, names, 2, 0.7)]
    hint = f"did you mean {' or '.join(found)}?" if 0 < len(found) < 4 else "--help of a subcommand lists all"
    return f"{key} is no setting; {hint}"
