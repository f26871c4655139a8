"""Every transport that runs on a CPU, from the trainer's host copy to the tensors of a server, within this process."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.incoming import ABANDON, Incoming
from lightning_ppo.refit.ipc_transport import IPCTransport
from lightning_ppo.refit.shared_memory_transport import SharedMemoryTransport

CPU = torch.device("cpu")
WEIGHTS = [
    ("embed", torch.arange(12.0).view(3, 4)),
    ("empty", torch.zeros(0, 4)),
    ("scalar", torch.tensor(7.0)),
    ("ids", torch.tensor([3, 1, 2])),
    ("tail", torch.arange(33.0)),
]


class Worker:
    """A server with one worker, in this process."""

    def __init__(self, name="server", fails_at=None):
        self.name = name
        self.incoming = Incoming(CPU, 0)
        self.received = {}
        self.updates = 0
        self.connects = 0
        self._fails_at = fails_at

    def world_size(self, timeout_s):
        return 1

    def connect(self, message, timeout_s):
        self.connects += 1
        self.incoming.connect(message)

    def update(self, message, timeout_s):
        self.updates += 1
        tensors = self.incoming.receive(dict(message))
        if self.updates == self._fails_at:
            raise EngineError(f"{self.name} has no room")
        self.received.update((name, tensor.clone()) for name, tensor in tensors)


@pytest.fixture(params=["shared_memory", "file", "gloo"])
def transport(request, tmp_path):
    made = {
        "shared_memory": SharedMemoryTransport,
        "file": lambda: FileTransport(tmp_path),
        "gloo": lambda: GroupTransport("gloo", "127.0.0.1", 20.0),
    }[request.param]()
    yield made
    made.close()


@pytest.fixture
def host():
    made = HostWeights.of(WEIGHTS, torch.float32, 100)
    yield made
    made.close()


def soon():
    return time.monotonic() + 20


def same(received, weights):
    assert received.keys() == {name for name, _ in weights}
    for name, tensor in weights:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_all_tensors_arrive_at_all_servers_again_and_again(transport, host):
    workers = [Worker("one"), Worker("two")]
    for factor in (1, 2):
        weights = [(name, tensor * factor) for name, tensor in WEIGHTS]
        assert transport.send(host, host.fill(weights, factor), workers, soon()) == {}
        for worker in workers:
            same(worker.received, weights)
            assert worker.updates == factor * len(host.buckets)
    assert len(host.buckets) > 1


def test_a_server_that_fails_gets_no_more_and_does_not_hold_up_the_others(transport, host):
    good, bad = Worker("good"), Worker("bad", fails_at=1)
    failures = transport.send(host, host.fill(WEIGHTS, 1), [bad, good], soon())
    assert {name: str(error) for name, error in failures.items()} == {"bad": "bad has no room"}
    same(good.received, WEIGHTS)
    assert bad.updates == 1
    # it is there again for the next update
    assert transport.send(host, iter(host.buckets), [bad, good], soon()) == {}
    same(bad.received, WEIGHTS)


def test_a_restarted_server_is_another_receiver(transport, host):
    assert transport.send(host, host.fill(WEIGHTS, 1), [Worker()], soon()) == {}
    for _ in range(3):
        again = Worker()
        assert transport.send(host, iter(host.buckets), [again], soon()) == {}
        same(again.received, WEIGHTS)


def test_the_group_of_a_server_that_is_gone_goes_too(host):
    transport = GroupTransport("gloo", "127.0.0.1", 20.0)
    kept, gone = Worker("kept"), Worker("gone")
    assert transport.send(host, host.fill(WEIGHTS, 1), [kept, gone], soon()) == {}
    assert len(transport._groups) == 2
    del gone
    gc.collect()
    assert transport.send(host, iter(host.buckets), [kept], soon()) == {}
    assert (len(transport._groups), kept.connects) == (1, 1)


def test_one_layer_of_no_bytes_and_no_layer_at_all(transport):
    for weights in ([("empty", torch.zeros(0, 3))], []):
        host = HostWeights.of(weights, torch.float32, 10)
        worker = Worker()
        assert transport.send(host, host.fill(weights, 1), [worker], soon()) == {}
        same(worker.received, weights)
        host.close()


def test_a_failing_export_reaches_the_caller(transport, host):
    worker = Worker()

    def breaks_off():
        yield from WEIGHTS[:4]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        transport.send(host, host.fill(breaks_off(), 1), [worker], soon())
    assert host.version is None


def test_the_next_bucket_is_copied_while_one_is_loaded(host):
    """The sender does not wait for a bucket to be loaded before it takes the next one."""
    taken, loading = threading.Event(), threading.Event()

    class Slow(Worker):
        def update(self, message, timeout_s):
            loading.set()
            assert taken.wait(10)
            super().update(message, timeout_s)

    def watched():
        for index, bucket in enumerate(host.fill(WEIGHTS, 1)):
            if index == 1:
                assert loading.wait(10)
                taken.set()
            yield bucket

    worker = Slow()
    assert SharedMemoryTransport().send(host, watched(), [worker], soon()) == {}
    same(worker.received, WEIGHTS)


def test_files_are_gone_as_soon_as_they_are_read(tmp_path, host):
    transport = FileTransport(tmp_path)
    transport.send(host, host.fill(WEIGHTS, 1), [Worker("bad", fails_at=1)], soon())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    transport.close()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.refit.host_weights import HostWeights

class Worker:
    name = "server"

    def update(self, message, timeout_s):
        os.kill(os.getpid(), signal.SIGKILL)

weights = [("a", torch.ones(4))]
host = HostWeights.of(weights, torch.float32, 100)
FileTransport(Path(sys.argv[1])).send(host, host.fill(weights, 1), [Worker()], 1e9)
"""


def test_what_a_killed_run_left_goes_and_what_others_use_stays(tmp_path, host):
    others = FileTransport(tmp_path)
    others.send(host, host.fill(WEIGHTS, 1), [Worker()], soon())
    (theirs,) = tmp_path.iterdir()
    # as in a container of its own, whose processes are not seen from here
    theirs = theirs.rename(theirs.with_name(theirs.name.replace(str(os.getpid()), "99999999")))
    foreign = tmp_path / "lightning_ppo-elsewhere-1-0"
    foreign.mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["update1-bucket0.safetensors"]
    transport = FileTransport(tmp_path)
    transport.send(host, host.fill(WEIGHTS, 1), [Worker()], soon())
    left = set(tmp_path.iterdir())
    assert {theirs, foreign} < left
    assert len(left) == 3
    transport.close()
    assert set(tmp_path.iterdir()) == {theirs, foreign}


def test_a_transfer_folder_that_somebody_clears_is_made_again(tmp_path, host):
    transport = FileTransport(tmp_path / "shared")
    for count in range(2):
        worker = Worker()
        assert transport.send(host, host.fill(WEIGHTS, count), [worker], soon()) == {}
        shutil.rmtree(tmp_path / "shared")


def test_a_transfer_folder_that_cannot_be_used(tmp_path, host):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"transfer_folder=.* cannot take"):
        FileTransport(tmp_path / "file").send(host, host.fill(WEIGHTS, 1), [Worker()], soon())


def test_a_file_that_the_server_cannot_see_or_read(tmp_path):
    incoming = Incoming(CPU, 0)
    with pytest.raises(EngineError, match=r"has no readable missing.safetensors"):
        incoming.receive({"kind": "file", "path": str(tmp_path / "missing.safetensors")})
    (tmp_path / "torn.safetensors").write_bytes(b"\x09\x00\x00")
    with pytest.raises(EngineError, match=r"has no readable torn.safetensors"):
        incoming.receive({"kind": "file", "path": str(tmp_path / "torn.safetensors")})


def shared_message(host, **changes):
    messages = []

    class Keep(Worker):
        def update(self, message, timeout_s):
            messages.append(dict(message))

    SharedMemoryTransport().send(host, host.fill(WEIGHTS, 1), [Keep()], soon())
    return {**messages[0], **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"pid": 2**22 + 5}, "No such file"), ({"fd": 10**6}, "No such file"), ({"inode": 1}, "found another file")],
)
def test_memory_that_is_not_shared(changes, reason, host):
    with pytest.raises(EngineError, match=f"transport=shared_memory .*{reason}"):
        Incoming(CPU, 0).receive(shared_message(host, **changes))


def test_a_server_cannot_write_into_the_trainers_copy(host):
    incoming = Incoming(CPU, 0)
    message = shared_message(host)
    (name, tensor), *_ = incoming.receive(message)
    tensor.fill_(-1.0)
    assert torch.equal(host.tensors(host.buckets[0])[name], WEIGHTS[0][1])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ABANDON, "given up by the trainer"),
        ({"kind": "carrier pigeon", "slots": [], "begin": 0, "end": 0}, "transport=carrier pigeon is unknown"),
        ({"kind": "group", "slots": [], "begin": 0, "end": 0}, "has no group yet"),
        ({"kind": "ipc", "slots": [], "begin": 0, "end": 0, "handles": {}}, "transport=ipc needs CUDA"),
        ({}, "is no list of tensors"),
    ],
)
def test_messages_that_cannot_be_followed(message, reason):
    with pytest.raises(EngineError, match=reason):
        Incoming(CPU, 0).receive(dict(message))


def test_a_server_that_never_joins_its_group_fails_in_time(host):
    class Absent(Worker):
        def connect(self, message, timeout_s):
            self.message = message

    transport = GroupTransport("gloo", "127.0.0.1", 1.0)
    (error,) = transport.send(host, host.fill(WEIGHTS, 1), [Absent()], soon()).values()
    assert "transport=gloo group of 2 did not come together in 1 s" in str(error)
    assert "\n" not in str(error)


def test_a_server_that_refuses_to_join_is_not_waited_for(host):
    class Refuses(Worker):
        def connect(self, message, timeout_s):
            raise EngineError("cannot see group_host")

    start = time.monotonic()
    (error,) = GroupTransport("gloo", "127.0.0.1", 15.0).send(host, host.fill(WEIGHTS, 1), [Refuses()], soon()).values()
    assert str(error) == "cannot see group_host"
    assert time.monotonic() - start < 10


def test_a_trainer_that_cannot_be_reached():
    message = {"backend": "gloo", "host": "127.0.0.1", "port": 9, "world_size": 2, "timeout_s": 0.5}
    with pytest.raises(EngineError, match=r"group_host=127.0.0.1 port 9 cannot be used"):
        Incoming(CPU, 0).connect(message)


def test_ipc_needs_cuda():
    with pytest.raises(EngineError, match="transport=ipc needs CUDA devices"):
        IPCTransport([CPU], 1)
    with pytest.raises(EngineError, match="transport=ipc needs CUDA devices"):
        IPCTransport([], 1)


def test_nccl_needs_cuda_on_both_sides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="transport=nccl needs CUDA and a torch with NCCL"):
        GroupTransport("nccl", "127.0.0.1", 5.0)
    message = {"backend": "nccl", "host": "127.0.0.1", "port": 9, "world_size": 2, "timeout_s": 0.5}
    with pytest.raises(EngineError, match="transport=nccl needs CUDA, this server runs on cpu"):
        Incoming(CPU, 0).connect(message)
