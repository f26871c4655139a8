"""Runs on two gloo ranks: `python two_ranks.py NAMES FOLDER POLICY`. Lightning starts this script again for rank 1.

Every rank writes what it saw to FOLDER; the tests do the same runs on one process and compare.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from runs import SETUPS, SaveMidStep, build

import lightning_ppo as ppo
from lightning_ppo.checkpoint import KEY
from lightning_ppo.errors import StepError
from lightning_ppo.rollout.engine import GenerationRequest
from lightning_ppo.testing import FakeEngine


class Signal(ppo.PPOCallback):
    """Sends SIGTERM to one rank in the middle of its work on a chunk."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_chunk_end(self, trainer, pl_module, payload):
        if payload.chunk.ppo_step == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


class Poison(ppo.PPOCallback):
    """Makes the advantages of rank 1 NaN in step 1."""

    def on_chunk_ready(self, trainer, pl_module, payload):
        if payload.chunk.ppo_step == 1 and trainer.global_rank == 1:
            for row in payload.chunk.rows:
                object.__setattr__(row, "reward", float("nan"))


def fit(name: str, policy: str, folder: Path) -> dict[str, Any]:
    """Train a named run."""
    return build(name, policy, folder, devices=2).fit()


def checkpointed(policy: str, folder: Path) -> dict[str, Any]:
    """Save in the middle of step 1; validate after every step, and before the first; log to a folder."""
    save = SaveMidStep(folder / "mid.ckpt", step=1)
    extra = {"logger": CSVLogger(folder), "limit_val_batches": 1.0, "num_sanity_val_steps": 1}
    run = build("full", policy, folder, devices=2, callbacks=(save,), **extra)
    result = run.fit()
    run.trainer.save_checkpoint(folder / "end.ckpt")
    return {**result, "writes": save.writes}


def resumed(policy: str, folder: Path) -> dict[str, Any]:
    """Go on from the checkpoint that the run before left."""
    run = build("full", policy, folder, devices=2)
    result = run.fit(folder / "mid.ckpt")
    run.trainer.save_checkpoint(folder / "end_of_resumed.ckpt")
    return result


def evaluated(policy: str, folder: Path) -> dict[str, Any]:
    """Validate and predict without training."""
    results = {}
    run = build("plain", policy, folder, devices=2, limit_val_batches=1.0, limit_predict_batches=1.0)
    results["validate"] = run.trainer.validate(run.module, run.data, verbose=False)
    run = build("plain", policy, folder, devices=2, limit_val_batches=1.0, limit_predict_batches=1.0)
    results["predict"] = run.trainer.predict(run.module, run.data)
    return results


def heartbeat(policy: str, folder: Path) -> dict[str, Any]:
    """Wait for rollouts, then for validation, for longer than the process group's timeout."""
    group = torch.distributed.distributed_c10d
    group._set_pg_timeout(timedelta(seconds=4))
    try:
        return build("heartbeat", policy, folder, devices=2, limit_val_batches=1.0).fit()
    finally:
        group._set_pg_timeout(timedelta(seconds=120))


def sigterm(rank: int, policy: str, folder: Path) -> dict[str, Any]:
    """One rank gets SIGTERM while it trains; all leave together, with the exit code of a terminated process."""
    run = build("running", policy, folder, devices=2, callbacks=(Signal(rank),))
    try:
        run.fit()
    except SIGTERMException as error:
        return {"code": error.code, "chunks": run.record.seen["chunks"]}
    return {"code": None}


def non_finite(policy: str, folder: Path) -> dict[str, Any]:
    """A loss is NaN on rank 1 only."""
    run = build("unequal", policy, folder, devices=2, callbacks=(Poison(),))
    try:
        run.fit()
    except StepError as error:
        return {**run.result(), "error": str(error)}
    return {"error": None}


def bad_reward(policy: str, folder: Path) -> dict[str, Any]:
    """The reward fails in step 1, on rank 0, where rewards are computed."""
    calls: list[str] = []

    def reward(response: str) -> float:
        calls.append(response)
        if len(calls) > 8:
            raise ValueError("no reward today")
        return float(len(calls))

    return build("plain", policy, folder, devices=2, reward=reward).fit()


def stuck(policy: str, folder: Path) -> dict[str, Any]:
    """Rank 0 waits for rollouts that never come, and tells when it begins to."""

    def hold(request: GenerationRequest) -> bool:
        threading.Timer(1.0, (folder / "waiting").touch).start()
        return True

    return build("plain", policy, folder, devices=2, engine=FakeEngine(holds=hold)).fit()


class Spoil(ppo.PPOCallback):
    """Puts a folder where rank 0 writes the schedule."""

    def on_chunk_end(self, trainer, pl_module, payload):
        path = Path(trainer.log_dir) / "schedule.jsonl"
        if payload.chunk.ppo_step == 1 and trainer.is_global_zero:
            path.unlink()
            path.mkdir()


def unwritable(policy: str, folder: Path) -> dict[str, Any]:
    """The schedule of step 1 cannot be written, on rank 0, when its rollouts are released."""
    return build("plain", policy, folder, devices=2, callbacks=(Spoil(),), logger=CSVLogger(folder)).fit()


def other_prompts(policy: str, folder: Path) -> dict[str, Any]:
    """The checkpoint is of other prompts, which rank 0 notices."""
    run = build("plain", policy, folder, devices=2)
    run.fit()
    run.trainer.save_checkpoint(folder / "plain.ckpt")
    if run.trainer.is_global_zero:
        saved = torch.load(folder / "plain.ckpt", weights_only=True)
        saved[KEY]["prompts"]["prompts"] = "other"
        torch.save(saved, folder / "other.ckpt")
    run.trainer.strategy.barrier()
    return build("plain", policy, folder, devices=2).fit(folder / "other.ckpt")


ACTIONS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    **{name: partial(fit, name) for name in SETUPS},
    "checkpointed": checkpointed,
    "resumed": resumed,
    "evaluated": evaluated,
    "heartbeat": heartbeat,
    "sigterm_0": partial(sigterm, 0),
    "sigterm_1": partial(sigterm, 1),
    "non_finite": non_finite,
    "bad_reward": bad_reward,
    "stuck": stuck,
    "unwritable": unwritable,
    "other_prompts": other_prompts,
}


def main(names: str, folder: Path, policy: str) -> None:
    """Do some actions, one after the other."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    try:
        for name in names.split(","):
            torch.save(ACTIONS[name](policy, folder), folder / f"{name}_{rank}.pt")
    except BaseException as error:
        (folder / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
