"""`lightning-ppo`: fit, validate, predict and export from a YAML file or the command line.

Exit codes: 0 success; 2 a setting, a data file or a checkpoint cannot be used (one line, before any process starts);
1 the run failed (one line, the traceback is in the run's `train.log`); 130 interrupted; 143 SIGTERM.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ppo.callbacks import PPOProgressBar, RunLog, SampleTable, StepCheckpoint
from lightning_ppo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    RolloutError,
    StepError,
    UpdateInProgressError,
)
from lightning_ppo.export import export_checkpoint, read_checkpoint
from lightning_ppo.module import PPOModule
from lightning_ppo.quiet import quiet_expected_warnings, quiet_loading
from lightning_ppo.rollout.datamodule import RolloutDataModule
from lightning_ppo.validation import reject

SETTING_ERRORS = (ConfigError, DataError, CheckpointError, MisconfigurationException)
RUN_ERRORS = (RewardError, EngineError, RolloutError, StepError, UpdateInProgressError)

_KEYWORDS = ("best", "last", "hpc")
"""Values of `ckpt_path` that are no paths, see `Trainer.fit`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    with _lightning_logs_to_file_only():
        try:
            cli = PPOCLI(list(sys.argv[1:] if argv is None else argv))
        except (*SETTING_ERRORS, ValueError, TypeError) as error:
            # nothing but settings has been looked at so far
            return _fail(2, error)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return cli.run()


class PPOParser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}\n")


class RunConfig(SaveConfigCallback):
    """Writes `config.yaml` once the run begins, so that a rejected setting leaves no folder behind."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Wait for the run to begin."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)
        _say(_headline(pl_module))

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.loggers and trainer.log_dir is not None:
            super().setup(trainer, pl_module, str(trainer.state.fn))


class PPOCLI(LightningCLI):
    """Parses and builds everything; `run` runs the subcommand."""

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
            parser_class=PPOParser,
            parser_kwargs={"prog": "lightning-ppo", "description": "Streaming PPO with a critic for language models."},
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
                "callbacks": [self._log],
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

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        self._subcommand_parsers = {}
        subcommands = parser.add_subcommands()
        for name, purpose in _PURPOSES.items():
            usage = f"lightning-ppo {name} --config FILE [--KEY VALUE ...]"
            self._subcommand_parsers[name] = self._prepare_subcommand_parser(
                L.Trainer, name, usage=usage, description=purpose
            )
            subcommands.add_subcommand(name, self._subcommand_parsers[name], help=purpose)
        purpose = "Write plain Hugging Face folders of the policy and the critic."
        export = self.parser_class(usage="lightning-ppo export CKPT DIR [--policy FOLDER]", description=purpose)
        export.add_argument("ckpt", type=str, help="Checkpoint of a run.")
        export.add_argument("directory", type=str, help="Where to write policy/ and critic/; new or empty.")
        export.add_argument("--policy", type=str | None, help="The run's policy folder, if it has moved since.")
        subcommands.add_subcommand("export", export, help=purpose)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    @override
    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint. Settings come from the command line and the YAML only, never from the checkpoint."""
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path is not None and path not in _KEYWORDS:
            read_checkpoint(path)

    @override
    def _set_seed(self) -> None:
        if self.subcommand != "export":
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
            files = config.get("config") or []
            parser = self._parser(self.subcommand)
            logger = {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {
                    "save_dir": str(config.trainer.default_root_dir or "runs"),
                    "name": Path(str(files[-1])).stem if files else "run",
                    # Lightning's placeholder metric has no meaning here
                    "default_hp_metric": False,
                },
            }
            self.config[self.subcommand] = parser.parse_object({"trainer": {"logger": logger}}, config)

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand != "export":
            with quiet_loading():
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
        if self.subcommand == "export":
            return self._export()
        try:
            super()._run_subcommand(str(self.subcommand))
        except SETTING_ERRORS as error:
            return _fail(2, error)
        except RUN_ERRORS as error:
            where = "" if self._log.path is None else f" (traceback in {self._log.path})"
            return _fail(1, error, where)
        except SIGTERMException:
            return self._stopped(143, "SIGTERM")
        except SystemExit:
            # what Lightning makes of a KeyboardInterrupt
            if not self.trainer.interrupted:
                raise
            return self._stopped(130, "interrupted")
        return 0

    def fit(self, **arguments: Any) -> None:
        """Train, then say where the files are."""
        self.trainer.fit(**_weights_only(arguments))
        _say(f"finished {self.trainer.global_step} PPO steps; {self._files()}")

    def validate(self, **arguments: Any) -> None:
        """Evaluate on the validation prompts, then print the metrics."""
        for metrics in self.trainer.validate(verbose=False, **_weights_only(arguments)):
            for name, value in sorted(metrics.items()):
                _say(f"{name} {value:.4f}")

    def predict(self, **arguments: Any) -> None:
        """Answer the validation prompts, then write `predictions.jsonl`, one row per prompt."""
        batches: Any = self.trainer.predict(return_predictions=True, **_weights_only(arguments))
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if rank_zero_only.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "predictions.jsonl"
        rows = [row for batch in batches for row in batch]
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        _say(f"wrote {len(rows)} rows to {path}")

    def _export(self) -> int:
        arguments = self.config["export"]
        try:
            with quiet_loading():
                export_checkpoint(arguments.ckpt, arguments.directory, arguments.policy)
        except SETTING_ERRORS as error:
            return _fail(2, error)
        _say(f"wrote {arguments.directory}/policy and {arguments.directory}/critic")
        return 0

    def _stopped(self, code: int, why: str) -> int:
        steps = self.trainer.global_step
        last = getattr(self.trainer.checkpoint_callback, "last_model_path", "")
        resume = f"resume with --ckpt_path {last}" if last else "no checkpoint was written yet"
        _complain(f"stopped: {why} after {steps} PPO step(s); {resume}")
        return code

    def _files(self) -> str:
        folder = self.trainer.log_dir
        if not self.trainer.loggers or folder is None:
            return "no logger, no files"
        names = ("checkpoints", "config.yaml", "train.log", "engine.log", "chunks.jsonl", "samples.md")
        found = ", ".join(name for name in names if (Path(folder) / name).exists())
        return f"files in {folder}: TensorBoard events, {found}"


_PURPOSES = {
    "fit": "Train a policy and a critic.",
    "validate": "Evaluate the policy on the validation prompts, greedily by default.",
    "predict": "Answer the validation prompts and write them to a file.",
}


def one_line(message: str) -> str:
    """Shorten jsonargparse's message to one line: the key, its value, and what would fit."""
    text = re.sub(r"<class '([^']+)'>", r"\1", message).replace("NoneType", "null")
    text = text.replace("typing.", "").replace("collections.abc.", "")
    key = re.search(r'Parser key "([^"]+)":', text)
    value = re.search(r"(?:Got|Given) value: (.*)\Z", text, re.DOTALL)
    expected = re.findall(r"Expected an? (.+?)(?:\. Got value|$)", text, re.MULTILINE)
    reason = re.search(r"expects a function or a callable class: (.*)", text)
    if key and value and reason:
        what = f"{key[1]}={value[1]} does not fit; {reason[1]}"
    elif key and value and expected:
        options = [re.sub(r"Literal\[(.*)\]", r"one of \1", option) for option in expected]
        what = f"{key[1]}={value[1]} does not fit; give {' or '.join(options)}"
    else:
        what = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
    return " ".join(what.split())


@contextmanager
def _lightning_logs_to_file_only() -> Iterator[None]:
    """Keep Lightning's INFO lines off the console; `RunLog` writes them to the run's file."""
    handlers = [
        handler
        for name in ("lightning", "lightning.pytorch", "lightning.fabric")
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _weights_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """Never run code from a checkpoint."""
    return arguments | {"weights_only": True if arguments.get("ckpt_path") else None}


def _headline(module: Any) -> str:
    rollout = module.rollouts.rollout
    mode = "streaming" if rollout.is_streaming else "full batch"
    return (
        f"policy {_size(module.policy)}, critic {_size(module.critic)} parameters; {rollout.num_prompts_per_step} x "
        f"{rollout.num_generations_per_prompt} responses per PPO step, {mode}; seed {module.rollouts.run_seed}"
    )


def _size(model: Any) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


def _say(text: str) -> None:
    if rank_zero_only.rank == 0:
        print(text, flush=True)


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(code: int, error: BaseException, where: str = "") -> int:
    # every rank finds the same fault in a setting
    if code != 2 or rank_zero_only.rank == 0:
        _complain(f"error: {' '.join(str(error).split())}{where}")
    return code


if __name__ == "__main__":
    sys.exit(main())
