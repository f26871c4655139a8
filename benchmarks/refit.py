"""Seconds per refit of one real vLLM server on the CPU, against a plain memcpy of the same bytes in the same run.

    python benchmarks/refit.py --sizes 1M 10M 100M --refits 9

Random Llama policies in float32, one server per size, one after the other: the server on core 1, everything else on
core 0. All transports refit that one server in turns with the memcpy (`torch.Tensor.copy_` between two flat buffers
that were touched before), so that whatever else the machine does hits all of them; medians over the refits.

A refit is what `VLLMEngine.update_weights` does, and is split into its calls:

    copy    into the host copy, on our side              load    the server takes its buckets (for `file` and `gloo`
    pause   requests are held; vLLM sleeps 20 ms in it           their way there is part of it)
    start   every layer waits for new tensors            finish  what is missing? then the layers compute again
                                                         resume  requests go on
    other   the rest: threads, writing files, waiting for what runs beside

`copy` of one bucket runs beside the `load` of the one before, so that parts may add up to more than the refit. The
last two columns are the goal, refit <= 2 x memcpy + a fixed cost. What a refit costs however few bytes there are is
seen twice in the same run, in a pause and a resume alone and in the refit of the smallest policy; `--fixed-s` leaves
room for what these do not show, the tenth of a millisecond per tensor of a deeper policy.

On a CPU vLLM's kernels want large matrices packed, which is a cost of the bytes that no transport can avoid. It is
measured alone, in a process of its own on the server's core, with the shapes of the state dict. When it is paid depends
on `--cpu-weights`: by the first forward pass after a refit (`packed`), by the refit (`vllm`), or never (`plain`). So
two short responses are asked for after every refit, one after the other: `first` and `next`.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ppo.refit.buckets import Bucket
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.rollout.engine import GenerationRequest, PolicySpec, SamplingParams
from lightning_ppo.rollout.vllm.config import Transport, VLLMConfig
from lightning_ppo.rollout.vllm.control import Control
from lightning_ppo.rollout.vllm.engine import VLLMEngine

TRAINER_CORE, SERVER_CORE = 0, 1
CONTEXT = 256
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "file", "gloo")
# hidden size, head size, size of the MLP, layers, vocabulary
SIZES = {
    "1M": (128, 32, 352, 4, 640),
    "10M": (384, 64, 1024, 5, 1536),
    "100M": (768, 64, 2048, 12, 10240),
}
CALLS = {"pause": "pause", "start_update": "start", "update": "load", "finish_update": "finish", "resume": "resume"}
PARTS = ("copy", "pause", "start", "load", "finish", "resume")
COLUMNS = (*PARTS, "other", "first", "next")


PACK = """
import os, statistics, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.set_num_threads(1)
matrices = [torch.randn(*map(int, shape.split("x"))) for shape in sys.argv[3:]]
packed, seconds = [None] * len(matrices), []
for _ in range(int(sys.argv[2]) + 2):
    start = time.perf_counter()
    for i, matrix in enumerate(matrices):
        packed[i] = ops.create_onednn_mm(matrix.t(), 32)
    seconds.append(time.perf_counter() - start)
print(statistics.median(seconds[2:]))
"""


def pack_alone(policy: LlamaForCausalLM, repeats: int) -> float:
    """Seconds that vLLM's kernels need to pack the policy's matrices; this process must not import vLLM."""
    shapes = [f"{len(weight)}x{weight.shape[1]}" for weight in policy.state_dict().values() if weight.ndim == 2]
    command = [sys.executable, "-c", PACK, str(SERVER_CORE), str(repeats), *shapes]
    # what it prints before is vLLM's own
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


@dataclass
class Stopwatch:
    """Adds up the parts of one refit."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, added to `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return run

    def watch(self, control: Control) -> None:
        """Time the calls of a server."""
        for name, part in CALLS.items():
            setattr(control, name, self.timed(part, getattr(control, name)))

    def watch_copies(self) -> None:
        """Time what fills host copies."""
        fill = HostWeights.fill

        def timed_fill(*args: Any) -> Iterator[Bucket]:
            buckets = fill(*args)
            take = self.timed("copy", lambda: next(buckets, None))
            while (bucket := take()) is not None:
                yield bucket

        HostWeights.fill = timed_fill  # type: ignore[method-assign]

    def read(self, call: Callable[[], Any]) -> dict[str, float]:
        """Seconds of `call` and of its parts."""
        self.seconds.clear()
        start = time.perf_counter()
        call()
        total = time.perf_counter() - start
        parts = {part: self.seconds[part] for part in PARTS}
        return {"total": total, **parts, "other": max(0.0, total - sum(parts.values()))}


def make_policy(size: str, *, tied: bool) -> LlamaForCausalLM:
    hidden, head, mlp, layers, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head,
        head_dim=head,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
    )
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM(config).eval()


def start_engines(policy: LlamaForCausalLM, args: argparse.Namespace, folder: str) -> dict[str, VLLMEngine]:
    """One engine per transport; the first one owns the server, which the others use too."""
    spec = PolicySpec(policy.config.to_json_string(use_diff=False), CONTEXT)
    common: dict[str, Any] = {
        "device": "cpu",
        "transfer_folder": folder,
        "bucket_bytes": args.bucket_mb * 1024 * 1024,
        # a look at the server's health would be part of somebody's refit
        "probe_interval_s": 3600.0,
    }
    engines: dict[str, VLLMEngine] = {}
    url: dict[str, Any] = {
        "cores": (SERVER_CORE,),
        "kv_cache_bytes": 64 * 1024 * 1024,
        "cpu_weights": args.cpu_weights,
    }
    try:
        for transport in args.transports:
            engine = VLLMEngine(VLLMConfig(transport=transport, **url, **common))
            engines[transport] = engine
            engine.start(spec)
            url = {"urls": (next(iter(engines.values())).fleet.members()[0].url,)}  # type: ignore[union-attr]
    except BaseException:
        close_all(engines)
        raise
    return engines


def close_all(engines: dict[str, VLLMEngine]) -> None:
    for engine in reversed(engines.values()):
        engine.close()


def measure(size: str, args: argparse.Namespace, watch: Stopwatch) -> tuple[int, int, dict[str, dict[str, float]]]:
    """Parameters, bytes, and medians of the refit of each transport, of `memcpy`, `hold` and `pack`."""
    policy = make_policy(size, tied=args.tied)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    # what travels is the state dict
    num_bytes = 4 * parameters
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        engines = start_engines(policy, args, folder)
        try:
            controls = {name: engine.fleet.members()[0].control for name, engine in engines.items()}  # type: ignore[union-attr]
            for control in controls.values():
                watch.watch(control)
            control = next(iter(controls.values()))

            def hold() -> None:
                control.pause(60.0)
                control.resume(60.0)

            def ask(engine: VLLMEngine) -> None:
                sampling = SamplingParams(max_tokens=1, temperature=0.0)
                request = GenerationRequest("short", tuple(range(2, 18)), sampling, seed=0)
                asyncio.run(engine.probe(request))

            # first refits reserve memory and join groups
            for number in range(-args.warmup, args.refits):
                found = {"memcpy": watch.read(lambda: target.copy_(source)), "hold": watch.read(hold)}
                for name, engine in engines.items():
                    version = number + args.warmup + 1
                    found[name] = watch.read(
                        lambda engine=engine, version=version: engine.update_weights(
                            policy.state_dict().items(), version
                        )
                    )
                    for when in ("first", "next"):
                        found[name][when] = watch.read(lambda engine=engine: ask(engine))["total"]
                if number >= 0:
                    for name, row in found.items():
                        rows[name].append(row)
        finally:
            close_all(engines)
    medians = {
        name: {part: statistics.median(row[part] for row in several) for part in several[0]}
        for name, several in rows.items()
    }
    medians["pack"] = {"total": pack_alone(policy, args.refits)}
    return parameters, num_bytes, medians


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="parameters of the policies")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--refits", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2, help="refits of each transport that do not count")
    parser.add_argument("--bucket-mb", type=int, default=VLLMConfig().bucket_bytes // 1024 // 1024)
    parser.add_argument("--cpu-weights", choices=("packed", "plain", "vllm"), default="packed", help="vllm.cpu_weights")
    parser.add_argument("--fixed-s", type=float, default=0.05, help="seconds that a refit may take beside the bytes")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding, as in many small models")
    parser.add_argument("--folder", default="/dev/shm", help="folder of the file transport")
    args = parser.parse_args()
    os.sched_setaffinity(0, {TRAINER_CORE})
    torch.set_num_threads(1)
    watch = Stopwatch()
    watch.watch_copies()
    print(
        "policy       MB   memcpy  transport       refit   ratio  "
        + "".join(f"{part:>8s}" for part in COLUMNS)
        + "   2m+fixed  goal",
        flush=True,
    )
    for size in args.sizes:
        parameters, num_bytes, found = measure(size, args, watch)
        memcpy = found["memcpy"]["total"]
        for name in args.transports:
            row = found[name]
            allowed = 2 * memcpy + args.fixed_s
            print(
                f"{parameters / 1e6:5.1f}M  {num_bytes / 1e6:7.1f}  {memcpy:7.4f}  {name:13s} {row['total']:7.4f}"
                f"  {row['total'] / memcpy:6.1f}  "
                + "".join(f"{row[part]:8.4f}" for part in COLUMNS)
                + f"  {allowed:9.4f}  {'reached' if row['total'] <= allowed else 'missed'}",
                flush=True,
            )
        hold, pack = found["hold"]["total"], found["pack"]["total"]
        print(f"       pause and resume alone: {hold:.4f} s; vLLM's packing alone: {pack:.4f} s", flush=True)
    print(f"medians of {args.refits}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
