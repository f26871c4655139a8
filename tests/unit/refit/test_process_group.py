"""The NCCL half of a group, on a library that only pretends."""

import os
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit import process_group
from lightning_ppo.refit.incoming import Incoming
from lightning_ppo.refit.process_group import Group

GPU = torch.device("cuda", 0)
SETTINGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING")


class Work:
    """One broadcast, complete after some looks."""

    def __init__(self, library):
        self._library = library
        self._looks = library.looks

    def is_completed(self):
        self._looks -= 1
        return self._looks < 0

    def wait(self, timeout=None):
        self._library.events.append("wait")
        assert self._looks < 0, "makes a stream wait without a deadline"
        if self._library.failure is not None:
            raise RuntimeError(self._library.failure)


class Stream:
    device = GPU

    def __init__(self, name, events):
        self.name, self._events = name, events

    def wait_stream(self, other):
        self._events.append(f"{self.name} waits for {other.name}")


class Library:
    """What was asked of NCCL and CUDA."""

    def __init__(self):
        self.events, self.settings, self.options = [], [], []
        self.looks = 3
        self.failure = None
        self.aborted = threading.Event()
        self.abort_failure = None
        library = self

        class ProcessGroupNCCL:
            Options = SimpleNamespace

            def __init__(self, store, rank, world_size, options):
                library.settings.append([os.environ.get(name) for name in SETTINGS])

            def broadcast(self, tensors, options):
                library.events.append(f"broadcast {tensors[0].numel()}")
                return Work(library)

            def abort(self):
                library.events.append("abort")
                library.aborted.set()
                if library.abort_failure is not None:
                    raise RuntimeError(library.abort_failure)

        self.c10d = SimpleNamespace(PrefixStore=lambda prefix, store: store, ProcessGroupNCCL=ProcessGroupNCCL)
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream("own", self.events),
            stream=lambda stream: nullcontext(),
            current_stream=lambda device: Stream("current", self.events),
        )


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(process_group, "_c10d", made.c10d)
    monkeypatch.setattr(process_group, "_cuda", made.cuda)
    return made


def join(rank=0):
    return Group("nccl", None, "127.0.0.1", 9, rank, 2, 5.0, GPU)


def test_torch_does_not_end_the_process_for_a_lost_peer_and_others_keep_their_settings(library, monkeypatch):
    monkeypatch.setenv(SETTINGS[0], "3")
    monkeypatch.delenv(SETTINGS[1], raising=False)
    before = dict(os.environ)
    join()
    assert library.settings == [["0", "0", "0"]]
    assert dict(os.environ) == before


def test_the_trainer_never_makes_its_stream_wait(library):
    join(rank=0).broadcast(torch.zeros(7, dtype=torch.uint8), 5.0)
    assert library.events == ["broadcast 7", "wait"]


def test_what_a_worker_receives_follows_what_used_the_memory_before_and_precedes_what_comes(library):
    join(rank=1).broadcast(torch.zeros(7, dtype=torch.uint8), 5.0)
    assert library.events == ["own waits for current", "broadcast 7", "wait", "current waits for own"]


def test_no_bytes_are_no_broadcast(library):
    join(rank=1).broadcast(torch.zeros(0, dtype=torch.uint8), 5.0)
    assert library.events == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broadcast_that_never_completes_ends_at_its_deadline(rank, library):
    library.looks = 10**9
    with pytest.raises(EngineError, match=r"^broadcast=7 bytes did not get through in 0 s; look at [^\n]*$"):
        join(rank).broadcast(torch.zeros(7, dtype=torch.uint8), 0.2)
    # nothing was queued behind it
    assert [event for event in library.events if event != "own waits for current"] == ["broadcast 7"]


def test_a_broadcast_that_failed_is_not_taken_for_a_complete_one(library):
    library.failure = "NCCL error: remote process exited\nmore"
    with pytest.raises(EngineError, match=r"did not get through \(NCCL error: remote process exited\)"):
        join().broadcast(torch.zeros(7, dtype=torch.uint8), 5.0)


def test_a_group_that_is_given_up_ends_its_broadcast(library):
    library.looks = 10**9
    group = join()
    failures = []

    def send():
        with pytest.raises(EngineError, match="the group is given up") as caught:
            group.broadcast(torch.zeros(7, dtype=torch.uint8), 60.0)
        failures.append(caught.value)

    thread = threading.Thread(target=send)
    thread.start()
    while "broadcast 7" not in library.events:
        time.sleep(0.005)
    group.abort()
    group.abort()
    thread.join(10)
    assert len(failures) == 1
    assert library.aborted.wait(10)
    assert library.events.count("abort") == 1


def test_a_group_that_cannot_be_given_up_is_no_error(library, caplog):
    library.abort_failure = "ProcessGroup abort timed out"
    join().abort()
    deadline = time.monotonic() + 10
    while "ProcessGroup abort timed out" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_worker_gives_up_a_group_that_failed(library, monkeypatch):
    monkeypatch.setattr("lightning_ppo.refit.incoming.open_store", lambda *arguments, **_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **settings: empty(*size, **settings))
    library.looks = 10**9
    incoming = Incoming(GPU, 0)
    incoming.connect({"backend": "nccl", "host": "127.0.0.1", "port": 9, "world_size": 2, "timeout_s": 0.2})
    message = {"kind": "group", "begin": 0, "end": 4, "slots": [["w", "float32", [1], 0]]}
    with pytest.raises(EngineError, match="did not get through"):
        incoming.receive(message)
    assert library.aborted.wait(10)
    with pytest.raises(EngineError, match="has no group yet"):
        incoming.receive(message)
