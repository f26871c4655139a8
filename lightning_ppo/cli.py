"""`lightning-ppo`: fit, validate, predict and export from a YAML file or the command line.

Exit codes: 0 success; 2 a setting, a data file or a checkpoint cannot be used (one line, before any process starts);
1 the run failed (one line, the traceback is in the run's `train.log`); 130 interrupted; 143 SIGTERM.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_ppo import __version__
from lightning_ppo.callbacks import RunLog, SampleTable
from lightning_ppo.callbacks.run_start import Headline, RunConfig
from lightning_ppo.console import (
    RUN_ERRORS,
    SETTING_ERRORS,
    complain,
    fail_run,
    fail_setting,
    lightning_warns_only,
    say,
)
from lightning_ppo.errors import ConfigError
from lightning_ppo.export import export_checkpoint, read_checkpoint
from lightning_ppo.module import PPOModule
from lightning_ppo.parser import PPOParser, add_callback_arguments, add_short_name, explain_checkpoint, export_parser
from lightning_ppo.quiet import quiet_expected_warnings
from lightning_ppo.rollout.datamodule import RolloutDataModule
from lightning_ppo.run_folder import describe, discard_unused, last_checkpoint, make_root
from lightning_ppo.seeds import check_global_seed
from lightning_ppo.validation import reject

_DESCRIPTION = "Streaming PPO with a critic for language models."
_PURPOSES = {
    "fit": "Train a policy and a critic.",
    "validate": "Evaluate the policy on the validation prompts, greedily by default.",
    "predict": "Answer the validation prompts and write them to a file.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    with lightning_warns_only():
        try:
            cli = PPOCLI(list(sys.argv[1:] if argv is None else argv))
        except (*SETTING_ERRORS, ValueError, TypeError) as error:
            # nothing but settings has been looked at so far
            return fail_setting(error)
        except KeyboardInterrupt:
            return 130
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return cli.run()


class PPOCLI(LightningCLI):
    """Parses and builds everything; `run` runs the subcommand.

    Args:
        argv: Arguments.
    """

    trainer: L.Trainer
    model: PPOModule
    datamodule: RolloutDataModule

    def __init__(self, argv: list[str]) -> None:
        quiet_expected_warnings()
        self._log = RunLog()
        super().__init__(
            PPOModule,
            RolloutDataModule,
            args=argv,
            auto_configure_optimizers=False,
            # settings are in config.yaml; those in a checkpoint would override the command line
            load_from_checkpoint_support=False,
            parser_class=PPOParser,
            parser_kwargs={"prog": "lightning-ppo", "description": _DESCRIPTION, "version": __version__},
            save_config_callback=RunConfig,
            # a logger whose version is fixed writes into the same folder again
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={
                "strategy": "streaming_ppo",
                "default_root_dir": "runs",
                # metrics are logged once per PPO step; the interval would count chunks
                "log_every_n_steps": 1,
                "enable_model_summary": False,
                "callbacks": [self._log, Headline()],
            },
        )

    # ------------------------------------------------------------------ arguments

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        skip = {"model", "datamodule", "weights_only"}
        return {
            "fit": skip | {"train_dataloaders", "val_dataloaders"},
            "validate": skip | {"dataloaders", "verbose"},
            "predict": skip | {"dataloaders", "return_predictions"},
        }

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_callback_arguments(parser)

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        self._subcommand_parsers = {}
        subcommands = parser.add_subcommands()
        for name, purpose in _PURPOSES.items():
            usage = f"lightning-ppo {name} --config FILE [--KEY VALUE ...]"
            subparser = self._prepare_subcommand_parser(L.Trainer, name, usage=usage, description=purpose)
            self._subcommand_parsers[name] = subparser
            explain_checkpoint(subparser)
            if name == "fit":
                add_short_name(subparser, "data.rollout.replay_schedule", "replay-schedule")
            subcommands.add_subcommand(name, subparser, help=purpose)
        purpose = "Write plain Hugging Face folders of the policy and the critic."
        subcommands.add_subcommand("export", export_parser(purpose), help=purpose)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    @override
    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint. Settings come from the command line and the YAML only, never from the checkpoint."""
        config = self.config[self.config.subcommand]
        path = config.get("ckpt_path")
        if path == "last":
            # every run has a folder of its own, in which Lightning would look for the last checkpoint in vain
            config.ckpt_path = path = last_checkpoint(_runs(config), config.checkpoint.dirpath)
        elif path == "best":
            raise reject("ckpt_path", path, "means nothing to a run that begins", "give the path, or last")
        if path is not None and path != "hpc":
            read_checkpoint(path)

    @override
    def _set_seed(self) -> None:
        if self.subcommand != "export":
            check_global_seed(self.config[self.subcommand].seed_everything)
            super()._set_seed()

    # ------------------------------------------------------------------ building

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand == "export":
            return
        config = self.config[self.subcommand]
        if str(config.trainer.precision) in ("16", "16-mixed"):
            # on a CPU Lightning would make it bf16-mixed before anybody sees it
            raise reject("trainer.precision", "16-mixed", "changes its loss scale between chunks", "set bf16-mixed")
        if self.subcommand in ("validate", "predict") and config.data.validation_prompts is None:
            raise ConfigError(
                f"data.validation_prompts=None leaves nothing to {self.subcommand}; give a jsonl file of prompts"
            )
        if config.trainer.logger in (None, True):
            runs = _runs(config)
            # Lightning's placeholder metric has no meaning here
            init_args = {"save_dir": str(runs.parent), "name": runs.name, "default_hp_metric": False}
            logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": init_args}
            parser = self._parser(self.subcommand)
            self.config[self.subcommand] = parser.parse_object({"trainer": {"logger": logger}}, config)

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand != "export":
            super().instantiate_classes()

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        if any(isinstance(callback, OnExceptionCheckpoint) for callback in given):
            # in its presence Lightning looks for a checkpoint to resume from, with warnings, before anybody is asked
            raise reject(
                "trainer.callbacks",
                "OnExceptionCheckpoint",
                "would save in the middle of a PPO step and resume from there",
                "use --checkpoint.every_n_train_steps 1",
            )
        unwanted: list[type] = []
        for kind, is_enabled in (
            (Checkpoint, config["enable_checkpointing"] is not False),
            (ProgressBar, config["enable_progress_bar"] is not False),
            (SampleTable, True),
        ):
            if not is_enabled or any(isinstance(callback, kind) for callback in given):
                unwanted.append(kind)
        wanted = [callback for callback in callbacks if not isinstance(callback, tuple(unwanted))]
        return super()._instantiate_trainer(config, wanted)

    # ------------------------------------------------------------------ running

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Wait for `run`."""

    def run(self) -> int:
        """Run the subcommand.

        Returns:
            The exit code.
        """
        try:
            if self.subcommand == "export":
                self._export()
            else:
                make_root(self.trainer)
                super()._run_subcommand(str(self.subcommand))
        except SETTING_ERRORS as error:
            if self.subcommand != "export" and self._log.path is None:
                discard_unused(self.trainer)
            return fail_setting(error)
        except RUN_ERRORS as error:
            return fail_run(error, self._log.path)
        except SIGTERMException:
            return self._stopped(143, "SIGTERM")
        except Exception as error:
            # of a callback, an optimizer or a schedule of the user's; without a log nobody would see where
            if self._log.path is None:
                raise
            return fail_run(f"{type(error).__name__}: {error}", self._log.path)
        except SystemExit:
            # what Lightning makes of a KeyboardInterrupt
            if not self.trainer.interrupted:
                raise
            return self._stopped(130, "interrupted")
        return 0

    def fit(self, **arguments: Any) -> None:
        """Train, then say where the files are."""
        self.trainer.fit(**_weights_only(arguments))
        say(f"finished {self.trainer.global_step} PPO steps; {describe(self.trainer)}")

    def validate(self, **arguments: Any) -> None:
        """Evaluate on the validation prompts, then print the metrics."""
        for metrics in self.trainer.validate(verbose=False, **_weights_only(arguments)):
            for name, value in sorted(metrics.items()):
                say(f"{name} {value:.4f}")

    def predict(self, **arguments: Any) -> None:
        """Answer the validation prompts, then write `predictions.jsonl`, one row per prompt."""
        batches: Any = self.trainer.predict(return_predictions=True, **_weights_only(arguments))
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if not self.trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row for batch in batches for row in batch]
        with (folder / "predictions.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        say(f"wrote {len(rows)} rows to {folder / 'predictions.jsonl'}")

    def _export(self) -> None:
        arguments = self.config["export"]
        export_checkpoint(arguments.ckpt, arguments.directory, arguments.policy)
        say(f"wrote {arguments.directory}/policy and {arguments.directory}/critic")

    def _stopped(self, code: int, why: str) -> int:
        last = getattr(self.trainer.checkpoint_callback, "last_model_path", "")
        resume = f"resume with --ckpt_path {last}" if last else "no checkpoint was written yet"
        complain(f"stopped: {why} after {self.trainer.global_step} PPO step(s); {resume}")
        return code


def _runs(config: Any) -> Path:
    """The folder of all runs of these settings: the logger's, else called after the last config file."""
    logger: Any = getattr(config.trainer.logger, "init_args", None)
    if logger is not None and logger.get("save_dir") is not None and logger.get("name") is not None:
        return Path(logger.save_dir) / logger.name
    files = config.get("config") or []
    return Path(config.trainer.default_root_dir or "runs") / (Path(str(files[-1])).stem if files else "run")


def _weights_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """Never run code from a checkpoint."""
    return arguments | {"weights_only": True if arguments.get("ckpt_path") else None}


if __name__ == "__main__":
    sys.exit(main())
