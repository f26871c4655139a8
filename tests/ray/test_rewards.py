import asyncio
import inspect
import logging
import math
import os
import threading
from pathlib import Path

import pytest
from processes import is_gone, wait_for

from lightning_ppo.errors import ConfigError, EngineError, RewardError
from lightning_ppo.rollout.ray.rewards import RemoteReward
from lightning_ppo.rollout.reward import RewardFunction
from lightning_ppo.testing import make_prompt


@pytest.fixture
def remote(runtime):
    """Start reward workers: `remote(function, workers=1, timeout_s=10)`; closed at the end."""
    started = []

    def start(reward, workers=1, timeout_s=10.0, **settings):
        started.append(RemoteReward(runtime, reward, workers, timeout_s, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def ask(reward, *responses):
    """All answers, awaited at once; errors among them."""

    async def ask_all():
        return await asyncio.gather(*(reward(response=text) for text in responses), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(ask_all(), 60))


def asked_as_reward(reward, response="abc", timeout_s=math.inf, **columns):
    function = RewardFunction(reward, frozenset(columns), timeout_s)
    return asyncio.run(function(make_prompt(row=3, **columns), response, "stop"))


def test_it_looks_like_the_function(remote):
    def count(response, answer, weight=2.0):
        return weight * len(response) + len(answer)

    reward = remote(count)
    assert inspect.signature(reward) == inspect.signature(count)
    assert reward.__qualname__ == count.__qualname__
    assert asked_as_reward(reward, answer="xy") == 8.0
    assert asked_as_reward(reward, answer="xy", weight=1.0) == 5.0
    with pytest.raises(ConfigError, match="asks for answer"):
        RewardFunction(reward, frozenset())


def test_synchronous_calls_run_in_all_workers_one_at_a_time(remote):
    def busy(response):
        import os
        import time

        begin = time.time()
        time.sleep(0.2)
        return float(f"{os.getpid()}") if response == "pid" else begin

    reward = remote(busy, workers=2)
    assert len(set(ask(reward, *["pid"] * 6))) == 2
    begins = sorted(ask(reward, *"abcdef"))
    # never three within the time of one
    assert all(later - earlier > 0.19 for earlier, later in zip(begins, begins[2:], strict=False))


def test_asynchronous_calls_run_at_the_same_time(remote):
    """Each waits for all others."""

    async def meet(response, meeting=[]):  # noqa: B006
        import asyncio

        meeting.append(response)
        while len(meeting) < 50:
            await asyncio.sleep(0.01)
        return len(meeting)

    assert ask(remote(meet), *map(str, range(50))) == [50.0] * 50


class Scorer:
    """A callable with state that is awaited."""

    def __init__(self, factor):
        self.factor = factor

    async def __call__(self, response):
        return self.factor * len(response)


def test_callable_object_with_state(remote):
    import ray

    # Like a user's script: the class goes along, because no worker can import it.
    module = inspect.getmodule(Scorer)
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        reward = remote(Scorer(3))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
    assert reward.__qualname__ == "Scorer"
    assert ask(reward, "ab") == [6.0]


@pytest.mark.parametrize("value", ["np.float32(0.5)", "np.array(0.5)", "torch.tensor(0.5)", "Fraction(1, 2)", "0.5"])
def test_numbers_of_many_kinds_arrive(shared_rewards, value):
    assert asked_as_reward(shared_rewards[False], value) == 0.5


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("{}['missing']", "failed: KeyError: 'missing'"),
        ("'text'", "failed: TypeError: it returned str, not a finite number"),
        ("threading.Lock()", "failed: TypeError: it returned lock, not a finite number"),
        ("float('nan')", "failed: ValueError: it returned nan, not a finite number"),
        ("sys.exit('no')", "failed: SystemExit: no"),
        ("throw(asyncio.CancelledError())", "was cancelled from within"),
        ("throw(Odd(1, 2))", "failed: Odd: 1 and 2"),
        ("throw(Locked('held'))", "failed: Locked: held"),
    ],
)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_errors_read_as_if_the_function_ran_here(shared_rewards, response, message, is_asynchronous):
    reward = shared_rewards[is_asynchronous]
    with pytest.raises(RewardError) as caught:
        asked_as_reward(reward, response)
    name = reward.__qualname__
    assert str(caught.value) == f"reward {name} {message} (prompt row 3, counted from 0: '^a=')"


def test_an_error_is_of_its_own_class_and_knows_where_it_was_raised(shared_rewards):
    (error,) = ask(shared_rewards[False], "1 / 0")
    assert type(error) is ZeroDivisionError
    assert "in evaluate" in str(error.__cause__)


@pytest.fixture(scope="module")
def shared_rewards(runtime):
    """A synchronous and an asynchronous function that evaluate the response."""

    def evaluate(response):
        import asyncio
        import sys
        import threading
        from fractions import Fraction

        import numpy as np
        import torch

        class Odd(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        class Locked(Exception):
            def __init__(self, text):
                super().__init__(text)
                self.lock = threading.Lock()

        def throw(error):
            raise error

        return eval(
            response, {**locals(), "asyncio": asyncio, "sys": sys, "np": np, "torch": torch, "Fraction": Fraction}
        )

    async def evaluate_async(response):
        return evaluate(response)

    rewards = {
        False: RemoteReward(runtime, evaluate, 1, 10.0),
        True: RemoteReward(runtime, evaluate_async, 1, 10.0),
    }
    yield rewards
    for one in rewards.values():
        one.close()


def test_import_path_of_a_module_and_of_a_file(remote, tmp_path, monkeypatch):
    """The workers search where the trainer searches, also what was added after Ray was started."""
    (tmp_path / "rewards_of_mine.py").write_text("FACTOR = 5\ndef longest(response): return FACTOR * len(response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ask(remote("rewards_of_mine:longest"), "ab") == [10.0]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert ask(remote("rewards_of_mine.py:longest"), "abc") == [15.0]
    Path("rewards_of_mine.py").unlink()


def test_a_worker_that_dies_is_replaced_and_the_call_is_made_again(remote, tmp_path, caplog):
    """The call after its worker's death, and the calls that had not begun, are answered."""
    mark = str(tmp_path / "died")

    def fragile(response):
        import os

        if response == "x" and not os.path.exists(mark):
            with open(mark, "w"):
                os._exit(7)
        return len(response)

    reward = remote(fragile)
    with caplog.at_level(logging.WARNING, "lightning_ppo"):
        assert ask(reward, "ab", "x", "abc", "abcd") == [2.0, 1.0, 3.0, 4.0]
    assert reward.replacements == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_ppo")]
    assert line.startswith("reward_worker_0 (process ")
    assert "died: " in line
    assert line.endswith("it is replaced (1 of at most 20)")
    assert "\n" not in line


@pytest.mark.slow
def test_a_call_that_always_kills_its_worker_fails_and_others_do_not(remote):
    def deadly(response):
        import os

        return os._exit(7) if response == "x" else len(response)

    reward = remote(deadly)
    first, second, third = ask(reward, "ab", "x", "abc")
    assert (first, third) == (2.0, 3.0)
    assert isinstance(second, EngineError)
    assert str(second).startswith("its worker died 3 times (reward_worker_0 (process ")
    assert ask(reward, "ab") == [2.0]


def test_replacements_are_bounded(remote):
    def deadly(response):
        import os

        os._exit(7)

    reward = remote(deadly, max_replacements=1)
    (error,) = ask(reward, "x")
    assert isinstance(error, EngineError)
    assert "and 1 reward workers were replaced before" in str(error)
    (error,) = ask(reward, "y")
    assert "and 1 reward workers were replaced before" in str(error)


def test_a_call_has_its_deadline_from_its_start(remote):
    """Ten calls of 0.3 s wait for one worker; the deadline of 2 s is for each."""

    def slow(response):
        import time

        time.sleep(0.3)
        return 1

    assert ask(remote(slow, timeout_s=2.0), *"abcdefghij") == [1.0] * 10


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_worker_that_hangs_is_replaced(remote, caplog, is_asynchronous):
    def hang(response):
        import time

        time.sleep(60 if response == "x" else 0)
        return len(response)

    async def hang_the_loop(response):
        return hang(response)

    reward = remote(hang_the_loop if is_asynchronous else hang, timeout_s=1.0)
    with caplog.at_level(logging.WARNING, "lightning_ppo"):
        (error,) = ask(reward, "x")
        assert isinstance(error, TimeoutError)
        assert str(error) == "took longer than reward_timeout_s=1"

        # The call still runs, and its caller's event loop is gone.
        wait_for(lambda: reward.replacements == 1, "another worker", 30)
        assert ask(reward, "ab", "abc") == [2.0, 3.0]
    assert reward.replacements == 1
    assert "reward_worker_0 (process " in caplog.text
    assert "hangs: a call goes on long after its deadline; it is replaced" in caplog.text


def test_an_asynchronous_call_that_is_too_slow_is_cancelled_and_its_worker_stays(remote, tmp_path):
    mark = tmp_path / "cancelled"
    name = str(mark)

    async def slow(response):
        import asyncio

        try:
            await asyncio.sleep(60 if response == "x" else 0)
        except asyncio.CancelledError:
            with open(name, "a") as file:
                file.write("x")
            raise
        return len(response)

    reward = remote(slow, timeout_s=0.5)
    slow_one, fast_one = ask(reward, "x", "ab")
    assert isinstance(slow_one, TimeoutError)
    assert fast_one == 2.0
    wait_for(lambda: mark.exists() and mark.read_text() == "x", "the cancellation", 30)
    with pytest.raises(
        RewardError, match=r"failed: TimeoutError: took longer than reward_timeout_s=0\.5 \(prompt row 3"
    ):
        asked_as_reward(reward, "x")
    assert ask(reward, "abc") == [3.0]
    assert reward.replacements == 0


def test_cancelling_the_caller_cancels_the_call(remote, tmp_path):
    started, cancelled = tmp_path / "started", tmp_path / "cancelled"
    names = str(started), str(cancelled)

    async def slow(response):
        import asyncio
        from pathlib import Path

        Path(names[0]).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            Path(names[1]).touch()
            raise

    reward = remote(slow, timeout_s=60.0)

    async def cancel():
        task = asyncio.create_task(reward(response="x"))
        while not started.exists():
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(asyncio.wait_for(cancel(), 30))
    wait_for(cancelled.exists, "the cancellation in the worker", 30)
    wait_for(lambda: [worker.outstanding for worker in reward._pool.workers] == [0], "the end of the call", 30)


def test_cancelled_callers_leave_the_queue(remote, tmp_path):
    """A running synchronous call is not interrupted; those behind it never begin, and the turn goes to the next."""
    log = tmp_path / "log"
    name = str(log)

    def slow(response):
        import time

        with open(name, "a") as file:
            file.write(response)
        time.sleep(1 if response == "a" else 0)
        return 1

    reward = remote(slow)

    async def run():
        tasks = [asyncio.create_task(reward(response=text)) for text in "abcd"]
        while not log.exists():
            await asyncio.sleep(0.05)
        for task in tasks[:3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    *cancelled, last = asyncio.run(asyncio.wait_for(run(), 30))
    assert [type(one) for one in cancelled] == [asyncio.CancelledError] * 3
    assert last == 1.0
    assert log.read_text() == "ad"


def test_after_close_calls_fail_also_those_that_wait(remote):
    def slow(response):
        import os
        import time

        time.sleep(0 if response == "pid" else 60)
        return os.getpid()

    reward = remote(slow)
    pid = int(ask(reward, "pid")[0])
    closer = threading.Timer(0.5, reward.close)
    closer.start()
    answers = ask(reward, "a", "b")
    closer.join()
    assert [type(answer) for answer in answers] == [EngineError] * 2
    assert str(answers[1]) == "the reward workers are closed"
    reward.close()
    wait_for(lambda: is_gone(pid), "the end of the worker", 30)
    assert str(ask(reward, "c")[0]) == "the reward workers are closed"


def test_bad_input_is_one_line(remote, tmp_path):
    lock = threading.Lock()

    def locked(response):
        return lock.locked()

    with pytest.raises(
        ConfigError, match=r"^reward=\S*locked cannot be sent to reward workers \(TypeError: [^\n]*; let"
    ):
        remote(locked)
    with pytest.raises(
        ConfigError, match=r"^reward_workers=99 needs 99 x \(0\.25 CPU\), but Ray has room for 8: 2 CPU"
    ):
        remote(len_of, workers=99)
    with pytest.raises(ConfigError, match="reward_workers=0 is not a valid count"):
        remote(len_of, workers=0)
    with pytest.raises(ConfigError, match="does not exist: no file"):
        remote(f"{tmp_path}/none.py:reward")
    with pytest.raises(ConfigError, match="has no signature to inspect"):
        remote(max)


def len_of(response):
    return len(response)


def test_a_function_that_no_worker_can_load(remote, tmp_path):
    """It can be imported here, and not there."""
    (tmp_path / "picky.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}, 'here only'\ndef reward(): ...\n"
    )
    with pytest.raises(ConfigError) as caught:
        remote(f"{tmp_path}/picky.py:reward")
    message = str(caught.value)
    assert message.startswith("reward_worker_0 (process ")
    assert "cannot load the reward function: " in message
    assert "AssertionError: here only" in message
    assert "\n" not in message


@pytest.mark.usefixtures("shared_rewards")
def test_workers_that_find_no_room_are_not_waited_for_for_ever(remote):
    import ray

    class Holder:
        """Holds resources. A class of the module would have the actor import the module."""

        def ready(self):
            """Say so."""

    # The shared ones hold the rest.
    holder = ray.remote(Holder).options(num_cpus=1.5).remote()
    ray.get(holder.ready.remote(), timeout=60)
    try:
        with pytest.raises(
            EngineError, match=r"^reward_workers=2 did not start within 1 s: 2 are not ready \(free: 0 CPU\)"
        ):
            remote(lambda response: 1, workers=2, start_timeout_s=1.0)
    finally:
        ray.kill(holder)
