"""What only a real GPU shows: other processes on it, memory that comes back, transports between processes."""

import asyncio
import multiprocessing
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import lightning_ppo as ppo
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.incoming import Incoming
from lightning_ppo.refit.ipc_transport import IPCTransport
from lightning_ppo.refit.process_group import Group, open_store
from lightning_ppo.rollout.engine import GenerationRequest, PolicySpec, SamplingParams
from lightning_ppo.rollout.local import LocalEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda:0"
REQUESTS = [
    GenerationRequest(f"r{seed}", (7, 9, 3 + seed), SamplingParams(12, temperature=1.0 if seed % 2 else 0.0), seed)
    for seed in range(6)
]


def start(policy_folder, **settings):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    engine = LocalEngine(ppo.LocalEngineConfig(**{"slots": 4, "trainer_threads": None, **settings}))
    engine.start(PolicySpec(model.config.to_json_string(use_diff=False), 32))
    engine.update_weights(model.state_dict().items(), 0)
    return engine


def generate(engine):
    async def gather():
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, REQUESTS)), 60)

    return asyncio.run(gather())


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_the_built_in_engine_generates_what_it_generates_on_the_host(policy_folder, backend):
    found = []
    for device in ("cpu", GPU):
        engine = start(policy_folder, device=device, backend=backend)
        try:
            found.append(generate(engine))
        finally:
            engine.close()
    for host, there in zip(*found, strict=True):
        assert host.token_ids == there.token_ids
        assert torch.tensor(host.logprobs).sub(torch.tensor(there.logprobs)).abs().max() < 1e-3


def test_the_built_in_engine_gives_its_memory_back(policy_folder):
    """Two hundred megabytes of keys and values; what a process's context takes stays."""
    engine = start(policy_folder, slots=16384, device=GPU)
    try:
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        assert asleep - awake > 100 * 2**20
        engine.wake()
        assert generate(engine)[0].token_ids
        assert torch.cuda.mem_get_info()[0] < asleep
    finally:
        engine.close()


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_with_engine_and_training_on_it(make_run, colocated, precision):
    metrics = []

    class Keep(ppo.PPOCallback):
        def on_ppo_step_end(self, trainer, pl_module, payload):
            metrics.append(payload.metrics)

    run = make_run(
        3,
        fake=LocalEngine(ppo.LocalEngineConfig(slots=8, device=GPU, trainer_threads=None)),
        rollout={"min_groups_for_streaming_train": 4 if colocated else 1, "colocated": colocated},
        callbacks=[Keep()],
        accelerator="gpu",
        devices=1,
        precision=precision,
    )
    run.fit()
    assert run.trainer.global_step == 3
    limit = 1e-3 if precision == "32-true" else 0.2
    assert all(step["rollout/sampler_mismatch_max"] < limit for step in metrics)


def _receive(pipe):
    """A server's worker: answers every message with the sums of the tensors in it."""
    incoming = Incoming(torch.device(GPU), 0)
    while (message := pipe.recv()) is not None:
        pipe.send({name: float(tensor.double().sum()) for name, tensor in incoming.receive(message)})
    incoming.close()


class Child:
    """A receiver in a process of its own, on the same GPU."""

    name = "child"

    def __init__(self, pipe):
        self.pipe, self.sums = pipe, {}

    def update(self, message, timeout_s):
        self.pipe.send(dict(message))
        assert self.pipe.poll(timeout_s)
        self.sums |= self.pipe.recv()


def test_cuda_ipc_between_two_processes():
    """Several buckets through one staging buffer, several times: no bucket is seen before it is there, or after."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    torch.manual_seed(0)
    weights = {f"w{i}": torch.randn(257 + i, 1021) for i in range(8)}
    host = HostWeights.of(list(weights.items()), torch.float32, 2 * 2**20)
    transport = IPCTransport([torch.device(GPU)], 2 * 2**20)
    try:
        for version in range(3):
            child = Child(ours)
            buckets = host.fill(weights.items(), version)
            assert transport.send(host, buckets, [child], time.monotonic() + 60) == {}
            for name, tensor in weights.items():
                assert child.sums[name] == pytest.approx(float(tensor.double().sum()), rel=1e-12)
            weights = {name: tensor * 1.5 for name, tensor in weights.items()}
    finally:
        transport.close()
        ours.send(None)
        process.join(30)
        host.close()


def test_a_group_of_one_on_nccl():
    """Two members would need two GPUs; joining and a broadcast on a stream are the same calls."""
    store = open_store("127.0.0.1", 0, 1, 30.0, is_master=True)
    torch.cuda.set_device(0)
    group = Group("nccl", store, "127.0.0.1", store.port, 0, 1, 30.0, torch.device(GPU))
    flat = torch.arange(1000, device=GPU).view(torch.uint8)
    torch.cuda.synchronize()
    group.broadcast(flat, 30.0)
    group.abort()
    assert torch.equal(flat.view(torch.int64).cpu(), torch.arange(1000))
