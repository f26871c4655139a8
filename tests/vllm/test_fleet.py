"""The fleet: start, probes, quarantine, restarts with the current weights, the end; with fake servers."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_gone, wait_for

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.fleet import Fleet
from lightning_ppo.rollout.vllm.launch import SubprocessLauncher
from lightning_ppo.rollout.vllm.member import MemberState
from lightning_ppo.rollout.vllm.port import ReservedPort
from lightning_ppo.rollout.vllm.sleep import Sleep

FAKE = str(Path(__file__).with_name("fake_server.py"))
QUICK = {
    "probe_interval_s": 0.1,
    "probe_timeout_s": 0.4,
    "quarantine_after": 2,
    "trust_after": 2,
    "start_timeout_s": 20.0,
    "update_timeout_s": 10.0,
}


OTHERS: set[threading.Thread] = set()
"""Threads from before a test: the session's shared engine has some of the same names."""


@pytest.fixture(autouse=True)
def _others():
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def keepers():
    """Names of the fleet's threads that this test has started."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-") and thread not in OTHERS]


def get(url, path, timeout=5.0):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class FakeControl:
    """The line to a fake server."""

    def __init__(self, url):
        self.url = self.name = url

    def sleep(self, timeout_s):
        self.health(timeout_s)

    def health(self, timeout_s):
        try:
            status, _ = get(self.url, "/health", timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"not reachable: {error}") from None
        if status != 200:
            raise EngineError(f"status {status}")

    def info(self):
        return get(self.url, "/info")[1]

    def do(self, mood):
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            get(self.url, f"/do/{mood}")

    def set_weights(self, version):
        return get(self.url, f"/weights/{version}")[1]


class World:
    """A fleet of fake servers, and what was done to it."""

    def __init__(self, **settings):
        self.words = {}
        self.launched = []
        self.pushed = []
        self.push_error = None
        self.push_gate = threading.Event()
        self.push_gate.set()
        self.config = VLLMConfig(**{**QUICK, **settings})
        launcher = None if self.config.urls else SubprocessLauncher(self.config, self.command)
        self.fleet = Fleet(self.config, launcher, FakeControl, self.push)

    def command(self, index, host, port, folder):
        self.launched.append(index)
        words = self.words.get(index, [])
        return [sys.executable, FAKE, str(port), *(words.pop(0) if words else [])], dict(os.environ)

    def push(self, member):
        assert self.push_gate.wait(20)
        self.pushed.append((member.name, member.state))
        if self.push_error is not None:
            raise self.push_error
        member.control.set_weights(self.fleet.version)

    def refit(self, version):
        with self.fleet.update(version) as members:
            for member in members:
                member.control.set_weights(version)
                member.version = version
        return [member.name for member in members]

    def pick(self):
        async def once():
            return await self.fleet.pick()

        return asyncio.run(once())

    def pids(self):
        return [member.control.info()["pid"] for member in self.fleet.members()]

    def states(self):
        return [member.state for member in self.fleet.members()]


@pytest.fixture
def make_world():
    worlds = []

    def make(start=True, **settings):
        world = World(**settings)
        worlds.append(world)
        if start:
            world.fleet.start()
        return world

    yield make
    for world in worlds:
        world.push_gate.set()
        world.fleet.close()


@pytest.fixture
def external():
    """Fake servers that are not ours: `external()` gives (url, restart)."""
    processes, ports = [], []

    def start(port=None):
        if port is None:
            port = ReservedPort("127.0.0.1")
            ports.append(port)
        url = f"http://127.0.0.1:{port.number}"
        process = subprocess.Popen([sys.executable, FAKE, str(port.number)])
        processes.append(process)

        def restart():
            process.kill()
            process.wait(10)
            start(port)

        wait_for(lambda: _answers(url))
        return url, restart

    yield start
    for process in processes:
        process.kill()
        process.wait(10)
    for port in ports:
        port.release()


def _answers(url):
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return get(url, "/info")[1]
    return None


SERVING, QUARANTINED, DEAD = MemberState.SERVING, MemberState.QUARANTINED, MemberState.DEAD


def put_in_quarantine(world):
    """Have the first server fail its probes, and return it."""
    member = world.fleet.members()[0]
    member.control.do("bad")
    world.fleet.report(member, ConnectionError())
    wait_for(lambda: member.state is QUARANTINED)
    return member


# ---------------------------------------------------------------------- start and end


def test_all_start_at_once_and_progress_is_told(make_world):
    world = make_world(start=False, num_servers=2)
    world.words = {0: [["slow=0.4"]]}
    told = []
    world.fleet.start(lambda *line: told.append(line))
    assert [(name, state) for name, state, _ in told if state is SERVING] == [
        ("server_1", SERVING),
        ("server_0", SERVING),
    ]
    assert [seconds for *_, seconds in told] == sorted(seconds for *_, seconds in told)
    assert len({member.url for member in world.fleet.serving()}) == 2
    assert world.pushed == []
    assert world.fleet.version is None


def test_close_leaves_nothing_and_may_be_repeated(make_world):
    world = make_world(num_servers=2)
    pids = world.pids()
    world.fleet.close()
    world.fleet.close()
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(EngineDiedError, match="are closed"):
        world.pick()
    with pytest.raises(EngineDiedError, match="are closed"):
        world.fleet.check_health()
    assert not keepers()


def test_a_server_that_ends_on_the_way_fails_the_start_with_its_cause(make_world, tmp_path):
    log = tmp_path / "text"
    log.write_text("(EngineCore pid=1) ERROR 11-30 02:22:41 [core.py:1] ValueError: no such colour\nINFO bye")
    world = make_world(start=False, num_servers=2)
    world.words = {1: [[f"log={log}", "exit=1"]]}
    with pytest.raises(EngineDiedError) as failure:
        world.fleet.start()
    message = str(failure.value)
    assert message == (
        "vLLM server_1 did not start: it exited with code 1: ValueError: no such colour;"
        " last lines of its log: ValueError: no such colour | INFO bye"
    )
    assert world.launched.count(1) == 1
    assert world.fleet.restarts == 0
    assert not keepers()


def test_a_server_that_never_answers_fails_the_start(make_world):
    world = make_world(start=False, start_timeout_s=0.5)
    world.words = {0: [["slow=60"]]}
    with pytest.raises(EngineError, match=r"^vllm\.start_timeout_s=0\.5 ran out before vLLM server_0 answered; raise"):
        world.fleet.start()


def test_a_port_that_is_taken_costs_no_restart(make_world, tmp_path):
    log = tmp_path / "text"
    log.write_text("OSError: [Errno 98] Address already in use")
    world = make_world(start=False)
    world.words = {0: [[f"log={log}", "exit=1"], [f"log={log}", "exit=1"]]}
    world.fleet.start()
    assert (world.launched, world.fleet.restarts, world.states()) == ([0, 0, 0], 0, [SERVING])


def test_a_port_that_is_always_taken_ends_the_start(make_world, tmp_path):
    log = tmp_path / "text"
    log.write_text("OSError: [Errno 98] Address already in use")
    world = make_world(start=False)
    world.words = {0: [[f"log={log}", "exit=1"]] * 5}
    with pytest.raises(EngineDiedError, match="its port is in use"):
        world.fleet.start()
    assert len(world.launched) == 3


def test_an_interrupted_start_closes_everything(make_world):
    world = make_world(start=False, num_servers=2)
    seen = []

    def interrupt(name, state, seconds):
        if state is SERVING:
            seen.extend(world.pids())
            raise KeyboardInterrupt

    world.words = {1: [["slow=1"]]}
    with contextlib.suppress(ConnectionError), pytest.raises(KeyboardInterrupt):
        world.fleet.start(interrupt)
    assert not keepers()
    assert all(is_gone(pid) for pid in seen)


# ---------------------------------------------------------------------- requests


def test_requests_go_where_least_is_outstanding(make_world):
    world = make_world(num_servers=2)
    first, second, third = world.pick(), world.pick(), world.pick()
    assert [member.name for member in (first, second, third)] == ["server_0", "server_1", "server_0"]
    world.fleet.release(first, succeeded=True)
    world.fleet.release(third)
    assert world.pick() is first
    assert world.pick() is first or second.outstanding == 1
    assert [member.outstanding for member in world.fleet.members()] == [2, 1]


def test_a_request_waits_for_a_server_and_may_be_cancelled(make_world):
    world = make_world(max_restarts=1)
    (member,) = world.fleet.members()
    world.words = {0: [["slow=0.5"]]}

    async def both():
        world.fleet.condemn(member, "test")
        doomed = asyncio.ensure_future(world.fleet.pick())
        waiting = asyncio.ensure_future(world.fleet.pick())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        doomed.cancel()
        picked = await asyncio.wait_for(waiting, 20)
        assert doomed.cancelled()
        return picked

    picked = asyncio.run(both())
    assert picked is world.fleet.members()[0]
    assert picked is not member
    assert (picked.outstanding, member.outstanding) == (1, 0)


def test_a_request_does_not_wait_for_ever(make_world, external):
    url, _ = external()
    world = make_world(urls=(url,), start_timeout_s=0.3, update_timeout_s=0.2)
    world.fleet.condemn(world.fleet.members()[0], "test")
    FakeControl(url).do("bad")
    with pytest.raises(EngineError, match=rf"^no vLLM server took a request within 0\.5 s: {url} quarantined"):
        world.pick()


def test_the_failed_request_of_a_dead_server_starts_its_replacement(make_world, caplog):
    """The next probe would come in a minute."""
    caplog.set_level(logging.INFO, "lightning_ppo")
    world = make_world(num_servers=2, probe_interval_s=60.0)
    world.refit(7)
    member = world.pick()
    os.kill(member.control.info()["pid"], signal.SIGKILL)
    world.fleet.report(member, ConnectionResetError("gone"))
    assert world.pick().name == "server_1"
    world.fleet.release(member)
    wait_for(lambda: world.fleet.members()[0] is not member and world.states() == [SERVING, SERVING])
    replacement = world.fleet.members()[0]
    assert replacement is not member
    assert member.state is DEAD
    assert (replacement.version, replacement.control.info()["weights"]) == (7, 7)
    assert world.pushed == [("server_0", MemberState.STARTING)]
    assert world.fleet.restarts == 1
    lines = [record.getMessage() for record in caplog.records]
    assert any("is dead: was ended by signal 9" in line for line in lines)
    assert "vLLM server_0: restart 1 of at most 5" in lines
    assert any("is serving: replaces one that died" in line and "policy version 7" in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_a_failed_request_of_a_well_server_changes_nothing(make_world):
    world = make_world(num_servers=2, probe_interval_s=60.0)
    member = world.pick()
    world.fleet.report(member, TimeoutError())
    assert member.state is SERVING
    wait_for(lambda: member.is_open)
    assert world.fleet.restarts == 0


def test_a_failed_request_and_a_failed_probe_quarantine_at_once(make_world):
    world = make_world(num_servers=2, probe_interval_s=60.0, quarantine_after=50)
    member = world.pick()
    member.control.do("bad")
    world.fleet.report(member, ConnectionError())
    assert world.pick().name == "server_1"
    wait_for(lambda: member.state is QUARANTINED)


def test_requests_that_keep_failing_condemn_a_server_that_says_it_is_well(make_world):
    world = make_world(probe_interval_s=0.05, quarantine_after=3)
    (member,) = world.fleet.members()
    for _ in range(60):
        world.fleet.report(member, ConnectionError("at once"))
    assert member.failed_requests <= 2
    deadline = time.monotonic() + 20
    while member.state is SERVING and time.monotonic() < deadline:
        world.fleet.report(member, TimeoutError("no answer"))
        time.sleep(0.02)
    wait_for(lambda: world.states() == [SERVING] and world.fleet.members()[0] is not member)
    assert world.fleet.restarts == 1


def test_a_response_starts_the_count_of_failed_requests_anew(make_world):
    world = make_world(probe_interval_s=0.02, quarantine_after=2)
    (member,) = world.fleet.members()
    for _ in range(4):
        wait_for(lambda: member.is_open)
        assert world.pick() is member
        world.fleet.report(member, TimeoutError())
        world.fleet.release(member, succeeded=True)
        time.sleep(0.03)
    assert (member.state, world.fleet.restarts) == (SERVING, 0)


# ---------------------------------------------------------------------- probes


def test_quarantine_and_trust(make_world):
    world = make_world(num_servers=2, quarantine_after=3)
    world.refit(1)
    member = world.fleet.members()[0]
    pid = member.control.info()["pid"]
    member.control.do("bad")
    wait_for(lambda: member.state is QUARANTINED)
    assert member.failures == 3
    assert [other.name for other in world.fleet.serving()] == ["server_1"]
    assert world.pick().name == "server_1"
    member.control.do("good")
    wait_for(lambda: member.state is SERVING)
    assert member.control.info()["pid"] == pid
    assert world.fleet.restarts == 0
    assert world.pushed == [], "it had the current weights"


def test_a_quarantined_server_that_missed_a_refit_gets_it_before_it_serves(make_world):
    world = make_world(num_servers=2, quarantine_after=20)
    world.refit(1)
    member = put_in_quarantine(world)
    assert world.refit(2) == ["server_1"]
    assert member.control.info()["weights"] == 1
    member.control.do("good")
    wait_for(lambda: member.state is SERVING)
    assert world.pushed == [("server_0", QUARANTINED)]
    assert (member.version, member.control.info()["weights"]) == (2, 2)


@pytest.mark.parametrize("failures", [1, 2])
def test_streaks_of_failures_are_forgotten_after_a_success(make_world, failures):
    world = make_world(quarantine_after=3)
    (member,) = world.fleet.members()
    for _ in range(2):
        member.control.do("bad")
        wait_for(lambda: member.failures >= failures)
        member.control.do("good")
        wait_for(lambda: member.failures == 0)
    assert world.fleet.restarts == 0


def test_a_hung_server_is_restarted(make_world, caplog, tmp_path):
    caplog.set_level(logging.INFO, "lightning_ppo")
    log = tmp_path / "text"
    log.write_text("the last words")
    world = make_world(start=False, num_servers=2)
    world.words = {0: [[f"log={log}"]]}
    world.fleet.start()
    world.refit(3)
    member = world.fleet.members()[0]
    pid = member.control.info()["pid"]
    member.control.do("hang")
    wait_for(lambda: world.fleet.members()[0] is not member and world.states() == [SERVING, SERVING])
    assert is_gone(pid)
    assert world.fleet.members()[0].version == 3
    (line,) = [
        line for line in map(logging.LogRecord.getMessage, caplog.records) if "server_0" in line and "dead" in line
    ]
    assert "hangs: 4 probes in a row failed" in line
    assert line.endswith("; it was still running; last lines of its log: the last words")


def test_a_slow_server_does_not_hold_up_the_probes_of_others(make_world):
    world = make_world(num_servers=2, probe_timeout_s=30.0)
    slow, quick = world.fleet.members()
    threading.Thread(target=slow.control.do, args=("hang",), daemon=True).start()
    time.sleep(0.3)
    quick.control.do("bad")
    wait_for(lambda: quick.state is QUARANTINED)
    assert slow.state is SERVING


def test_probes_go_on_during_a_refit_that_takes_long(make_world):
    world = make_world(num_servers=2, quarantine_after=20)
    first, second = world.fleet.members()
    with world.fleet.update(1) as members:
        assert members == (first, second)
        second.control.do("bad")
        wait_for(lambda: second.failures >= 3)
        second.control.do("good")
        wait_for(lambda: second.failures == 0)
        for member in members:
            member.version = 1
    assert world.states() == [SERVING, SERVING]


# ---------------------------------------------------------------------- restarts and refits


def test_the_budget_of_restarts_and_the_end(make_world):
    world = make_world(num_servers=2, max_restarts=1)
    os.kill(world.pids()[0], signal.SIGKILL)
    wait_for(lambda: world.fleet.restarts == 1 and world.states() == [SERVING, SERVING])
    os.kill(world.pids()[0], signal.SIGKILL)
    wait_for(lambda: world.states() == [DEAD, SERVING])
    assert world.pick().name == "server_1"
    world.fleet.check_health()
    os.kill(world.fleet.members()[1].control.info()["pid"], signal.SIGKILL)
    wait_for(lambda: world.states() == [DEAD, DEAD])
    with pytest.raises(EngineDiedError) as failure:
        world.pick()
    message = str(failure.value)
    assert message.startswith(
        "no vLLM server is left, with vllm.max_restarts=1 used up: server_0 was ended by signal 9;"
    )
    assert "server_1 was ended by signal 9" in message
    assert message.count("last lines of its log") == 2
    with pytest.raises(EngineDiedError, match="no vLLM server is left"):
        world.fleet.check_health()


def test_requests_that_wait_learn_of_the_end(make_world):
    world = make_world(max_restarts=1)
    (member,) = world.fleet.members()
    world.words = {0: [["slow=0.3", "exit=1"]]}

    async def wait():
        world.fleet.condemn(member, "test")
        return await asyncio.wait_for(
            asyncio.gather(*(world.fleet.pick() for _ in range(3)), return_exceptions=True), 20
        )

    outcomes = asyncio.run(wait())
    assert [type(outcome) for outcome in outcomes] == [EngineDiedError] * 3
    assert "server_0 did not start: it exited with code 1" in str(outcomes[0])


def test_a_failed_restart_is_tried_again(make_world):
    world = make_world()
    world.words = {0: [["exit=1"]]}
    os.kill(world.pids()[0], signal.SIGKILL)
    wait_for(lambda: world.fleet.restarts == 2 and world.states() == [SERVING])


def test_a_replacement_that_refuses_the_weights_never_serves(make_world):
    world = make_world(max_restarts=2)
    world.refit(1)
    world.push_error = EngineError("wrong shape")
    world.fleet.condemn(world.fleet.members()[0], "test")
    with pytest.raises(EngineDiedError, match=r"max_restarts=2 used up: server_0 wrong shape"):
        world.pick()
    assert world.states() == [DEAD]
    assert len(world.pushed) == 2


def test_a_defect_in_push_is_not_tried_again(make_world):
    world = make_world()
    world.refit(1)
    world.push_error = KeyError("oops")
    world.fleet.condemn(world.fleet.members()[0], "test")
    with pytest.raises(EngineDiedError, match=r"server_0 is not looked after any more: KeyError: 'oops'"):
        world.pick()
    assert world.fleet.restarts == 1


def test_a_replacement_waits_for_a_refit_and_gets_the_new_weights(make_world):
    world = make_world(num_servers=2)
    world.refit(1)
    first, second = world.fleet.members()
    with world.fleet.update(2) as members:
        os.kill(first.control.info()["pid"], signal.SIGKILL)
        wait_for(lambda: world.fleet.members()[0] is not first)
        replacement = world.fleet.members()[0]
        wait_for(lambda: _answers(replacement.url))
        time.sleep(0.3)
        assert (world.pushed, replacement.state) == ([], MemberState.STARTING)
        assert first in members
        second.version = 2
    wait_for(lambda: replacement.state is SERVING)
    assert replacement.control.info()["weights"] == 2
    assert second.state is SERVING


def test_a_refit_waits_for_a_push_but_not_for_ever(make_world):
    world = make_world(num_servers=2)
    world.refit(1)
    world.push_gate.clear()
    world.fleet.condemn(world.fleet.members()[0], "test")
    time.sleep(0.2)
    wait_for(lambda: world.fleet.members()[0].state is MemberState.STARTING)
    wait_for(lambda: world.fleet._gate._lock.locked())
    with pytest.raises(EngineError, match=r"update_timeout_s=0\.2 ran out"), world.fleet.update(2, limit_s=0.2):
        pass
    assert world.fleet.version == 1
    world.push_gate.set()
    wait_for(lambda: world.states() == [SERVING, SERVING])
    assert world.refit(2) == ["server_0", "server_1"]


def test_a_member_that_does_not_confirm_is_replaced(make_world):
    world = make_world(num_servers=2)
    world.refit(1)
    first, second = world.fleet.members()
    with world.fleet.update(2) as members:
        first.version = None
        second.version = 2
    assert members == (first, second)
    assert first.state is not SERVING
    wait_for(lambda: world.states() == [SERVING, SERVING])
    assert world.fleet.members()[0] is not first
    assert [member.version for member in world.fleet.members()] == [2, 2]


def test_a_refit_that_raises_leaves_the_old_version(make_world):
    world = make_world(num_servers=2)
    world.refit(1)
    first, second = world.fleet.members()

    def fail():
        with world.fleet.update(2):
            first.version = None
            raise RuntimeError("trainer")

    with pytest.raises(RuntimeError, match="trainer"):
        fail()
    assert world.fleet.version == 1
    assert second.state is SERVING
    wait_for(lambda: world.states() == [SERVING, SERVING])
    assert [member.version for member in world.fleet.members()] == [1, 1]
    assert world.fleet.members()[0] is not first


def test_close_during_a_restart(make_world):
    world = make_world(num_servers=2)
    world.refit(1)
    world.push_gate.clear()
    world.words = {1: [["slow=30"]]}
    for member in world.fleet.members():
        world.fleet.condemn(member, "test")
    wait_for(lambda: world.launched.count(0) == 2 and world.launched.count(1) == 2)
    threading.Timer(0.5, world.push_gate.set).start()
    world.fleet.close()
    wait_for(lambda: not keepers())


# ---------------------------------------------------------------------- asleep


def test_a_server_that_dies_asleep_is_restarted_once_the_engine_wakes_up(make_world):
    world = make_world(num_servers=2)
    world.refit(4)
    with world.fleet.falling_asleep(10.0) as members:
        assert [member.name for member in members] == ["server_0", "server_1"]
    lost = members[0]
    os.kill(lost.control.info()["pid"], signal.SIGKILL)
    wait_for(lambda: lost.state is DEAD and world.fleet._keepers[0].is_held)
    # longer than a restart takes
    time.sleep(0.5)
    assert (world.launched.count(0), world.fleet.restarts, world.states()) == (1, 0, [DEAD, SERVING])
    world.fleet.woken_up()
    wait_for(lambda: world.states() == [SERVING, SERVING])
    assert (world.launched.count(0), world.fleet.restarts, world.pushed) == (2, 1, [("server_0", MemberState.STARTING)])


def test_what_does_not_obey_has_ended_before_training_begins(make_world):
    world = make_world(num_servers=2)
    pids = world.pids()
    with world.fleet.falling_asleep(10.0) as members:
        world.fleet.condemn(members[1], "it does not fall asleep")
    assert [is_gone(pid) for pid in pids] == [False, True]
    assert world.launched.count(1) == 1
    world.fleet.woken_up()
    wait_for(lambda: world.states() == [SERVING, SERVING])


def test_a_start_under_way_ends_for_the_sleep_and_goes_on_after_it(make_world, tmp_path):
    world = make_world(num_servers=2, max_restarts=1)
    told = tmp_path / "pids"
    world.words = {0: [[f"pids={told}", "slow=60"]]}
    world.fleet.condemn(world.fleet.members()[0], "test")
    wait_for(told.exists)
    (pid, _) = wait_for(lambda: json.loads(told.read_text() or "0"))
    with world.fleet.falling_asleep(10.0) as members:
        assert [member.name for member in members] == ["server_1"]
    assert is_gone(pid)
    world.fleet.woken_up()
    wait_for(lambda: world.states() == [SERVING, SERVING])
    # one that had been interrupted is no second one
    assert (world.fleet.restarts, world.launched.count(0)) == (1, 3)


def test_nobody_is_let_in_while_the_engine_sleeps(make_world):
    world = make_world(num_servers=2, quarantine_after=20)
    world.refit(1)
    member = put_in_quarantine(world)
    world.refit(2)
    with world.fleet.falling_asleep(10.0):
        member.control.do("good")
    wait_for(lambda: member.successes >= 4)
    assert (member.state, world.pushed) == (QUARANTINED, [])
    world.fleet.woken_up()
    wait_for(lambda: member.state is SERVING)
    assert world.pushed == [("server_0", QUARANTINED)]


def test_a_server_out_of_service_does_not_keep_the_memory_of_a_gpu(make_world):
    world = make_world(num_servers=2, quarantine_after=20)
    world.refit(1)
    first, second = world.fleet.members()
    pid = second.control.info()["pid"]
    second.control.do("bad")
    world.fleet.report(second, ConnectionError())
    wait_for(lambda: second.state is QUARANTINED)
    Sleep(world.fleet, 10.0, frees_memory=True).begin()
    assert is_gone(pid)
    # its weights went with its memory
    assert (first.state, first.version) == (SERVING, None)


def test_a_sleep_that_fails_lets_servers_start(make_world):
    world = make_world()

    def fall_asleep():
        with world.fleet.falling_asleep(10.0) as (member,):
            world.fleet.condemn(member, "test")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fall_asleep()
    wait_for(lambda: world.states() == [SERVING] and world.fleet.restarts == 1)


def test_close_while_the_engine_sleeps(make_world):
    world = make_world()
    with world.fleet.falling_asleep(10.0) as (member,):
        world.fleet.condemn(member, "test")
    world.fleet.close()
    assert not keepers()


# ---------------------------------------------------------------------- servers that are not ours


def test_external_servers_are_never_started_or_stopped(make_world, external):
    (one, _), (two, _) = external(), external()
    world = make_world(urls=(one, two))
    assert [member.name for member in world.fleet.members()] == [one, two]
    assert world.refit(4) == [one, two]
    world.fleet.close()
    assert [_answers(url)["weights"] for url in (one, two)] == [4, 4]


def test_an_external_server_that_returns_gets_the_weights_before_it_serves(make_world, external):
    url, restart = external()
    world = make_world(urls=(url,))
    world.refit(5)
    (member,) = world.fleet.members()
    world.push_gate.clear()
    restart()
    wait_for(lambda: member.state is QUARANTINED or _answers(url)["weights"] is None)
    world.fleet.condemn(member, "test")
    assert _answers(url)["weights"] is None
    time.sleep(0.5)
    assert member.state is QUARANTINED
    world.push_gate.set()
    wait_for(lambda: member.state is SERVING)
    assert _answers(url)["weights"] == 5
    assert world.fleet.restarts == 0
    assert world.fleet.members() == (member,)


def test_an_external_server_that_refuses_the_weights_stays_out(make_world, external):
    url, _ = external()
    world = make_world(urls=(url,))
    world.refit(1)
    (member,) = world.fleet.members()
    world.push_error = EngineError("wrong shape")
    world.fleet.condemn(member, "test")
    wait_for(lambda: len(world.pushed) >= 2)
    assert member.state is QUARANTINED
    world.push_error = None
    wait_for(lambda: member.state is SERVING)


def test_an_external_server_that_is_not_there(make_world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        expected = rf"^vllm\.urls={url} does not answer /health within start_timeout_s=0\.4; start it or correct it$"
        with pytest.raises(EngineError, match=expected):
            make_world(urls=(url,), start_timeout_s=0.4)
