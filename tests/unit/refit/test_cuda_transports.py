"""What NCCL and CUDA IPC need of this machine's side, with devices and groups that only pretend."""

import threading
import time
import weakref

import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit import cuda_handles, group_transport, incoming, ipc_transport, staging, transport
from lightning_ppo.refit.group_transport import GroupTransport
from lightning_ppo.refit.host_weights import HostWeights
from lightning_ppo.refit.incoming import Incoming
from lightning_ppo.refit.ipc_transport import IPCTransport
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.transports import make_transport
from lightning_ppo.rollout.vllm.weight_update import WeightUpdate

MB = 2**20
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


def soon():
    return time.monotonic() + 20


class Memory:
    """What is staged: bytes now, and at most."""

    def __init__(self):
        self._lock = threading.Lock()
        self.now = self.most = 0

    def count(self, tensor):
        self._add(tensor.numel())
        weakref.finalize(tensor, self._add, -tensor.numel())

    def _add(self, num_bytes):
        with self._lock:
            self.now += num_bytes
            self.most = max(self.most, self.now)


@pytest.fixture
def memory(monkeypatch):
    """Staged bytes, in host memory."""
    made = Memory()

    class HostStaging:
        def __init__(self, device):
            self.device = device

        def reserve(self, num_bytes):
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            made.count(buffer)
            return buffer

        def write(self, flat, target):
            target[: flat.numel()].copy_(flat)

    monkeypatch.setattr(group_transport, "Staging", HostStaging)
    monkeypatch.setattr(ipc_transport, "Staging", HostStaging)
    return made


@pytest.fixture
def _cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


# ---------------------------------------------------------------------- NCCL


class FakeGroup:
    """A group whose other side may never answer."""

    made: list["FakeGroup"] = []  # noqa: RUF012
    hangs = False

    def __init__(self, backend, store, host, port, rank, world_size, timeout_s, device):
        self.device, self.aborted = device, threading.Event()
        FakeGroup.made.append(self)

    def broadcast(self, flat, timeout_s):
        if FakeGroup.hangs and not self.aborted.wait(timeout_s):
            raise EngineError(f"broadcast={flat.numel()} bytes did not get through")

    def abort(self):
        self.aborted.set()


class Server:
    """A receiver; `update` may be slow or fail."""

    def __init__(self, name, update=lambda: None):
        self.name, self.updates, self._update = name, 0, update

    def world_size(self, timeout_s):
        return 1

    def connect(self, message, timeout_s):
        """Join at once."""

    def update(self, message, timeout_s):
        self.updates += 1
        self._update()


def refuse():
    raise EngineError("died")


@pytest.fixture
def nccl(memory, _cuda, monkeypatch):
    monkeypatch.setattr(group_transport, "Group", FakeGroup)
    monkeypatch.setattr(FakeGroup, "made", [])
    monkeypatch.setattr(FakeGroup, "hangs", False)
    return GroupTransport("nccl", "127.0.0.1", 20.0, DEVICES[1])


@pytest.fixture
def host():
    """Eight buckets and the small first one, of a megabyte each."""
    weights = [(f"w{index}", torch.zeros(MB // 4)) for index in range(9)]
    made = HostWeights(HostWeights.of(weights, torch.float32, MB)._shared.layout, MB)
    list(made.fill(weights, 1))
    yield made
    made.close()


def gone(memory):
    deadline = time.monotonic() + 10
    while memory.now:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_buckets_are_staged_at_most(nccl, host, memory):
    servers = [Server("quick"), Server("slow", lambda: time.sleep(0.02))]
    assert nccl.send(host, iter(host.buckets), servers, soon()) == {}
    assert [server.updates for server in servers] == [9, 9]
    assert (memory.now, memory.most) == (0, 2 * MB)


def test_servers_that_fail_keep_nothing_staged(nccl, host, memory):
    good = Server("good", lambda: time.sleep(0.01))
    failures = nccl.send(host, iter(host.buckets), [Server("bad", refuse), good], soon())
    assert {name: str(error) for name, error in failures.items()} == {"bad": "died"}
    assert good.updates == 9
    # its half of the broadcast that failed may end a moment later
    gone(memory)
    assert memory.most <= 3 * MB
    assert set(nccl.send(host, iter(host.buckets), [Server("bad", refuse)], soon())) == {"bad"}
    gone(memory)


def test_a_server_that_dies_in_a_broadcast_costs_its_group(nccl, host, memory):
    """The trainer's half waits for a peer that is gone."""
    FakeGroup.hangs = True
    server = Server("bad", refuse)
    assert set(nccl.send(host, iter(host.buckets), [server], soon())) == {"bad"}
    (first,) = FakeGroup.made
    assert first.aborted.is_set()
    gone(memory)
    # the next time it joins another one
    FakeGroup.hangs = False
    server._update = lambda: None
    assert nccl.send(host, iter(host.buckets), [server], soon()) == {}
    assert len(FakeGroup.made) == 2
    assert not FakeGroup.made[1].aborted.is_set()


def test_a_broadcast_that_does_not_get_through_costs_the_group_too(nccl, host):
    FakeGroup.hangs = True
    stuck = threading.Event()
    failures = nccl.send(host, iter(host.buckets), [Server("bad", lambda: stuck.wait(20))], time.monotonic() + 0.3)
    stuck.set()
    assert "did not get through" in str(failures["bad"])
    assert FakeGroup.made[0].aborted.is_set()


def test_two_calls_that_hang_beyond_their_deadline_are_left_behind(monkeypatch):
    monkeypatch.setattr(transport, "_PATIENCE_S", 0.1)
    stuck = threading.Event()
    with pytest.raises(EngineError, match="hangs beyond its deadline"):
        transport.run_together(lambda: None, lambda: stuck.wait(20), time.monotonic() + 0.1)
    stuck.set()


def test_groups_are_given_up_with_the_transport_and_with_their_server(nccl, host):
    servers = [Server("one"), Server("two")]
    assert nccl.send(host, iter(host.buckets), servers, soon()) == {}
    del servers[1]
    assert sorted(group.aborted.is_set() for group in FakeGroup.made) == [False, True]
    nccl.close()
    assert all(group.aborted.is_set() for group in FakeGroup.made)


@pytest.mark.usefixtures("_cuda", "memory")
def test_nccl_sends_from_the_device_of_the_thread_that_starts_the_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(group_transport, "Group", FakeGroup)
    monkeypatch.setattr(FakeGroup, "made", [])
    made = make_transport(VLLMConfig(transport="nccl", device="cuda"), is_here=True)
    weights = [("w", torch.zeros(3))]
    host = HostWeights.of(weights, torch.float32, MB)
    list(host.fill(weights, 1))
    # a keeper's thread has another one
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert made.send(host, iter(host.buckets), [Server("one")], soon()) == {}
    host.close()
    assert [group.device for group in FakeGroup.made] == [torch.device("cuda", 3)]


# ---------------------------------------------------------------------- CUDA IPC


class Opener:
    """A server on one device, which opens what it is told to."""

    def __init__(self, uuid, fails=False):
        self.name, self.buckets, self.opened = f"server on {uuid}", [], set()
        self._uuid, self._fails = uuid, fails

    def pause(self, timeout_s, *, clear_cache=True):
        # as vLLM does: time to copy everything
        time.sleep(0.1)

    def start_update(self, timeout_s):
        """Begin at once."""

    def finish_update(self, version, timeout_s):
        """Complete at once."""

    def resume(self, timeout_s):
        """Go on at once."""

    def update(self, message, timeout_s):
        if self._fails:
            refuse()
        self.buckets.append((message["begin"], message["end"]))
        self.opened.add(message["handles"][self._uuid][0])


@pytest.fixture
def exports(memory, monkeypatch):
    """Handles that were made, in order."""
    made = []

    def share(buffer):
        made.append(f"handle {len(made)}")
        return [made[-1]]

    monkeypatch.setattr(ipc_transport, "share", share)
    monkeypatch.setattr(ipc_transport, "device_uuid", lambda device: f"GPU-{device.index}")
    return made


def test_a_larger_policy_gets_a_larger_buffer(exports, memory):
    sender = IPCTransport(DEVICES[:1], 8 * MB)
    for megabytes, held in ((1, 1), (4, 4), (2, 4)):
        update = WeightUpdate(sender, torch.float32, 8 * MB, 20.0, clear_cache=True)
        assert update.update([Opener("GPU-0")], [("w", torch.zeros(megabytes * MB // 4))], 1) == {}
        assert memory.now == held * MB
    assert len(exports) == 2
    sender.close()


@pytest.mark.parametrize(("total", "largest"), [(20, 256), (100, 256), (100, 30)])
def test_what_was_joined_fits_the_buffer(total, largest, exports, memory):
    weights = [(f"w{index}", torch.full((total * MB // 80,), float(index))) for index in range(20)]
    update = WeightUpdate(IPCTransport(DEVICES[:1], largest * MB), torch.float32, largest * MB, 20.0, clear_cache=True)
    server = Opener("GPU-0")
    for version in (1, 2):
        assert update.update([server], weights, version) == {}
    update.push(server)
    assert memory.most == min(total, largest) * MB
    assert max(end - begin for begin, end in server.buckets) <= largest * MB
    update.close()
    assert memory.now == 0


def test_a_tensor_that_is_larger_than_a_bucket_fits_the_buffer(exports, memory):
    update = WeightUpdate(IPCTransport(DEVICES[:1], MB), torch.float32, MB, 20.0, clear_cache=True)
    assert update.update([Opener("GPU-0")], [("small", torch.zeros(3)), ("large", torch.zeros(MB))], 1) == {}
    assert memory.most >= 4 * MB
    update.close()


def test_a_device_is_exported_once_however_many_open_it_or_fail(exports, host):
    """torch keeps the memory of an export until it was opened and released."""
    sender = IPCTransport(DEVICES, MB)
    servers = [Opener("GPU-0"), Opener("GPU-0"), Opener("GPU-1", fails=True)]
    for _ in range(3):
        assert set(sender.send(host, iter(host.buckets), servers, soon())) == {"server on GPU-1"}
    assert exports == ["handle 0", "handle 1"]
    assert [server.opened for server in servers] == [{"handle 0"}, {"handle 0"}, set()]


def test_an_export_is_not_kept_by_torch_for_servers_that_never_let_go(monkeypatch):
    released = []
    fields = (0, b"handle", 1024, 0, b"counter", 3, b"event", True)

    class Storage:
        def _share_cuda_(self):
            return fields

        def _release_ipc_counter(self, handle, offset, device):
            released.append((handle, offset))

    class Flat:
        device = DEVICES[0]

        def untyped_storage(self):
            return Storage()

    assert cuda_handles.decode_handle(cuda_handles.share(Flat()), 0) == fields
    assert released == [(b"counter", 3)]


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, [0]),
        ({"num_servers": 2, "devices_per_server": 2}, [0, 1, 2, 3]),
        ({"urls": ("http://a:1", "http://b:1")}, [0, 1]),
        ({"num_servers": 2, "devices": (5, 3)}, [5, 3]),
        ({"urls": ("http://a:1", "http://b:1"), "devices": (5, 3)}, [5, 3]),
        ({"num_servers": 9}, list(range(8))),
        ({"placement": "ray", "num_servers": 2}, [0, 1]),
    ],
)
@pytest.mark.usefixtures("_cuda")
def test_only_devices_that_servers_run_on_are_used(settings, numbers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    made = make_transport(VLLMConfig(transport="ipc", device="cuda", **settings), is_here=True)
    assert [device.index for device in made._devices] == numbers


def test_a_worker_opens_a_handle_once_and_answers_when_it_has_copied(monkeypatch):
    events = []
    memory = torch.arange(8, dtype=torch.uint8)

    class Stream:
        def synchronize(self):
            events.append("copied")

    def open_shared(handle, device):
        events.append(f"open {handle[0]}")
        return memory

    monkeypatch.setattr(incoming, "device_uuid", lambda device: "GPU-0")
    monkeypatch.setattr(incoming, "open_shared", open_shared)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    worker = Incoming(DEVICES[0], 0)
    slots = [["w", "uint8", [8], 0]]
    for handle in ("first", "first", "second"):
        message = {"kind": "ipc", "handles": {"GPU-0": [handle]}, "begin": 0, "end": 8, "slots": slots}
        ((_, tensor),) = worker.receive(message)
        assert tensor.tolist() == list(range(8))
        assert tensor.data_ptr() != memory.data_ptr()
    assert events == ["open first", "copied", "copied", "open second", "copied"]
    worker.close()


def test_a_device_without_room_is_one_line(monkeypatch):
    class Full:
        def __init__(self, device):
            """Nothing."""

        def __enter__(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

        def __exit__(self, *error):
            """Nothing."""

    monkeypatch.setattr(staging._cuda, "Stream", lambda device: None)
    monkeypatch.setattr(staging._cuda, "stream", Full)
    with pytest.raises(EngineError, match=r"^bucket=7 bytes have no room on cuda:0; lower vllm.bucket_bytes[^\n]*$"):
        staging.Staging(DEVICES[0]).reserve(7)
