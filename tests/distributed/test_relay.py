"""The relay on two threads: whatever ends the work on rank 0 reaches the other rank, and nobody leaves alone."""

import queue
import threading
import time

import pytest
import torch

from lightning_ppo import ranks
from lightning_ppo.ranks import Ranks, Relay


class Pair:
    """Two ranks on two threads, with the two collectives that a relay uses."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=10)
        self.mail = queue.Queue()
        self.parts = [0.0, 0.0]
        self.heartbeats = 0
        self.stopped = [False, False]

    def broadcast(self, rank, message):
        if rank == 0:
            self.mail.put(message)
            return message
        message = self.mail.get(timeout=10)
        self.heartbeats += message.is_heartbeat
        return message

    def sum_(self, rank, tensor):
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(self.parts[0] + self.parts[1])
        self.barrier.wait()

    def run(self, work):
        """Run `work` on both ranks; return what each returned or raised."""
        ends = [None, None]

        def go(rank):
            relay = Relay(
                Ranks(rank, 2, lambda tensor: self.sum_(rank, tensor)),
                lambda message: self.broadcast(rank, message),
                is_stopped=lambda: self.stopped[rank],
                stop=lambda: SystemExit(143),
            )
            try:
                ends[rank] = relay.run(work)
            except BaseException as error:
                ends[rank] = error

        threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        return ends


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(ranks, "HEARTBEAT_S", 0.02)
    return Pair()


class Unportable(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, code, reason):
        super().__init__(f"{code} {reason}")


class Unnameable(Exception):
    """Rebuilding it raises what no rebuilding should."""

    def __init__(self, *reasons):
        super().__init__()
        self.reason = reasons[0]

    def __str__(self):
        return self.reason


def test_result_reaches_every_rank_after_heartbeats(pair):
    def work(poll):
        for _ in range(5):
            time.sleep(0.03)
            poll()
        return [1, None]

    assert pair.run(work) == [[1, None], [1, None]]
    assert pair.heartbeats == 5


def test_result_may_be_none(pair):
    assert pair.run(lambda poll: None) == [None, None]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_error_reaches_every_rank(pair, error):
    def work(poll):
        raise error

    first, second = pair.run(work)
    assert first is error
    assert type(second) is type(error)
    assert second.args == error.args


@pytest.mark.parametrize(
    ("error", "text"), [(Unportable(1, "boom"), "Unportable: 1 boom"), (Unnameable("boom"), "Unnameable: boom")]
)
def test_error_that_cannot_travel_arrives_as_its_text(pair, error, text):
    def work(poll):
        raise error

    first, second = pair.run(work)
    assert first is error
    assert str(second) == text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["before", "during"])
def test_stop_of_one_rank_ends_both(pair, rank, when):
    pair.stopped[rank] = when == "before"

    def work(poll):
        pair.stopped[rank] = True
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.01)
            poll()

    ends = pair.run(work)
    assert [type(end) for end in ends] == [SystemExit, SystemExit]
    assert [end.code for end in ends] == [143, 143]


def test_lost_rank_is_not_written_to_again():
    """The error of the heartbeat itself is what is raised, once."""
    sent = []

    def lost(message):
        sent.append(message)
        raise RuntimeError("Connection closed by peer")

    relay = Relay(Ranks(0, 2, lambda tensor: None), lost, is_stopped=lambda: False, stop=lambda: SystemExit(143))

    def work(poll):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.05)
            poll()

    with pytest.raises(RuntimeError, match="Connection closed"):
        relay.run(work)
    assert len(sent) == 1


def test_alone_nothing_is_sent():
    def never(message):
        raise AssertionError(message)

    stopped = [False]
    relay = Relay(Ranks.single(), never, is_stopped=lambda: stopped[0], stop=lambda: SystemExit(143))
    assert relay.run(lambda poll: poll() or 5) == 5
    stopped[0] = True
    with pytest.raises(SystemExit):
        relay.run(lambda poll: poll())


@pytest.mark.parametrize(("flags", "expected"), [((0, 0), False), ((0, 1), True), ((1, 1), True)])
def test_any_asks_every_rank(flags, expected):
    mine, theirs = flags
    both = Ranks(0, 2, lambda tensor: tensor.add_(torch.tensor(float(theirs))))
    assert both.any(bool(mine)) is expected
