"""Runs training in forked processes that may be killed: a script, `test_exactly_once.py` talks to it.

Importing everything takes seconds, so one process does it once, says `ready`, and forks a child per run. It reads one
job per line (JSON) from its standard input and answers with one line each: the child's `os.waitstatus_to_exitcode`.
A child is killed when its deadline has passed. It leaves in the job's folder: `{name}.steps`, a line per completed PPO
step; `{name}.requests`, a line per request of the engine; `{name}.end` when it was not killed; `{name}.output`.
"""

import asyncio
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import lightning_ppo as ppo
from lightning_ppo.rollout.stream import sample_seed
from lightning_ppo.testing import CHARACTERS, FakeEngine

DEADLINE_S = 60
P, G = 4, 2
"""Prompts per step, and responses per prompt, in every job."""
SEED = 5
_SPEC = importlib.util.spec_from_file_location("shared", Path(__file__).parents[1] / "conftest.py")
shared = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(shared)


def draw_of(request: Any) -> int:
    """Draw of a training request."""
    return int(request.request_id.split("_")[0].removeprefix("draw"))


def size(seed: int) -> float:
    """How long the response of this seed is, and how slow; 0 to 1."""
    return random.Random(seed).random()


def longest_beside(draw: int) -> int:
    """Draw of the group with the longest responses in the batch that `draw` belongs to."""
    batch = range(draw // P * P, draw // P * P + P)
    return max(batch, key=lambda other: sum(size(sample_seed(SEED, other, index)) for index in range(G)))


def kill() -> None:
    """Die at once, as a machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Log:
    """A file whose lines survive a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, row: Any) -> None:
        os.write(self._file, json.dumps(row).encode() + b"\n")


class ScriptedEngine(FakeEngine):
    """Until a step's first chunk was trained, one group too few is finished: no step is a single chunk."""

    def __init__(self, job: dict[str, Any], log: Log) -> None:
        length = (lambda request: 1 + int(7 * size(request.seed))) if job.get("long_are_slow") else None
        super().__init__(delay_s=lambda request: 0.002 * size(request.seed), length=length)
        self.log, self.job = log, job
        self.epoch = job.get("start", 0)
        self.chunk_of_step = self.before = self.epoch - 1
        """The last step of which a chunk was trained; at first, the one before this run."""
        self.ranks: dict[int, int] = {}
        """Draws by order of their arrival."""
        self.wait_step = (job.get("kill") or {}).get("wait")

    async def generate(self, request: Any) -> Any:
        draw, version = draw_of(request), self.version
        self.log.write([draw, request.request_id, version])
        if self.wait_step is not None and draw > self.wait_step * P:
            await self._die_waiting()
        rank = self.ranks.setdefault(draw, len(self.ranks))
        while self._is_early(draw, rank, version):
            await asyncio.sleep(0.002)
        return await super().generate(request)

    def _is_early(self, draw: int, rank: int, version: int) -> bool:
        if self.job.get("after_save") and self.epoch < version:
            return True
        if self.job["rollout"].get("sampler") == "ready_first" and draw % 8 == 6 and self.chunk_of_step <= draw // P:
            # trained after draws of later batches, so that a checkpoint's trained draws have a gap
            return True
        if self.job.get("long_are_slow"):
            return draw == longest_beside(draw) and self.chunk_of_step < draw // P
        return rank >= P * (self.chunk_of_step - self.before) + P - 1

    async def _die_waiting(self) -> None:
        while self.chunk_of_step < self.wait_step:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        kill()


class Recorder(ppo.PPOCallback):
    """Writes down what every completed step trained."""

    def __init__(self, log: Log, engine: ScriptedEngine) -> None:
        # `log` is a name of Lightning's
        self.steps, self.engine, self.chunks = log, engine, []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.engine.epoch = trainer.current_epoch

    def on_chunk_ready(self, trainer: Any, pl_module: Any, payload: Any) -> None:
        self.chunks = [*self.chunks, list(payload.chunk.draws)] if payload.chunk.index else [list(payload.chunk.draws)]

    def on_chunk_end(self, trainer: Any, pl_module: Any, payload: Any) -> None:
        self.engine.chunk_of_step = payload.chunk.ppo_step

    def on_ppo_step_end(self, trainer: Any, pl_module: Any, payload: Any) -> None:
        rows = [row.trajectory for row in payload.batch.rows]
        self.steps.write(
            {
                "step": payload.ppo_step - 1,
                "chunks": self.chunks,
                "prompts": ["".join(CHARACTERS[token] for token in row.prompt_ids) for row in rows],
                "samples": [row.sample_id for row in rows],
                "length": sum(len(row.response_ids) for row in rows) / len(rows),
                "versions": [row.policy_versions.tolist() for row in rows],
                "policy_age": payload.metrics["rollout/policy_age_max"],
                "version_age": payload.metrics["rollout/version_age_max"],
            }
        )


class Killer(ppo.PPOCallback):
    """Dies in a hook."""


def make_killer(hook: str, step: int) -> Killer:
    """Build a callback that dies in this hook of this PPO step; `on_chunk_end` before the closing chunk."""

    def method(self: Any, trainer: Any, pl_module: Any, payload: Any) -> None:
        is_last = hook == "on_chunk_end" and payload.chunk.is_closing
        if trainer.current_epoch == step and not is_last:
            kill()

    return type("Killer", (Killer,), {hook: method})()


class WriteKiller(ModelCheckpoint):
    """Dies while a checkpoint is being written: in the middle of the file, or before it gets its name."""

    def __init__(self, *args: Any, at: int, where: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at, self._where = at, where

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if trainer.global_step == self._at and self._where == "middle":
            # the kernel ends the process at this very byte
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        elif trainer.global_step == self._at:
            os.replace = os.rename = lambda *_, **__: kill()
        super()._save_checkpoint(trainer, filepath)


def build(job: dict[str, Any], policy: str) -> tuple[Any, Any, Any, Any]:
    """Build trainer, module, data module and engine of a job."""
    folder, name = Path(job["folder"]), job["name"]
    engine = ScriptedEngine(job, Log(folder / f"{name}.requests"))
    rollout = {
        "num_prompts_per_step": P,
        "num_generations_per_prompt": G,
        "min_groups_for_streaming_train": 1,
        "max_response_tokens": 8,
        "timeout_s": 20.0,
        "seed": SEED,
        **job.get("rollout", {}),
    }
    data = shared.FakeRollouts(
        shared.PROMPTS[: job.get("prompts", 24)],
        shared.count_letters,
        rollout=ppo.RolloutConfig(**rollout),
        local=ppo.LocalEngineConfig(trainer_threads=None),
        fake=engine,
    )
    settings = {"importance_correction": "truncated", **job.get("ppo", {})}
    module = ppo.PPOModule(policy, ppo=ppo.PPOConfig(**settings))
    death = job.get("kill") or {}
    arguments = {"every_n_train_steps": job["every"], "save_top_k": -1, "filename": "{step}"}
    if job.get("only_last"):
        arguments |= {"save_top_k": 1, "filename": "only", "enable_version_counter": False}
    if "write" in death:
        saver = WriteKiller(folder / "saved", **arguments, at=death["write"], where=death["where"])
    else:
        saver = ModelCheckpoint(folder / "saved", **arguments)
    callbacks = [Recorder(Log(folder / f"{name}.steps"), engine), saver]
    if "hook" in death:
        callbacks.insert(1, make_killer(death["hook"], death["step"]))
    trainer = L.Trainer(
        strategy=ppo.StreamingPPOStrategy(),
        max_epochs=job["steps"],
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=job["logs"]) if job.get("logs") else False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    return trainer, module, data, engine


def train(job: dict[str, Any], policy: str) -> None:
    """Do one job."""
    warnings.simplefilter("ignore")
    trainer, module, data, _ = build(job, policy)
    path = job.get("resume")
    trainer.fit(module, data, ckpt_path=path, weights_only=True if path else None)
    position = data.position()
    columns = position["rollouts"]
    end = {"stream": position["stream"], "ready": columns["draws"][: columns["num_ready"]], "draws": columns["draws"]}
    (Path(job["folder"]) / f"{job['name']}.end").write_text(json.dumps(end))


def child(job: dict[str, Any], policy: str) -> None:
    """Be the forked process."""
    signal.alarm(DEADLINE_S)
    output = os.open(Path(job["folder"]) / f"{job['name']}.output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        train(job, policy)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(policy: str) -> None:
    """Do all jobs, one at a time."""
    torch.set_num_threads(1)
    # what the first model of a process loads lazily, once for all children
    ppo.PPOModule(policy)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line), policy)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
