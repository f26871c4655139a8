import threading

import pytest

from lightning_ppo.errors import RolloutError
from lightning_ppo.testing import FakeEngine


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rollout-collector"]


def test_close_cancels_everything_and_ends_the_thread(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)
    until(lambda: len(engine.held) == 8)
    collector.close()
    collector.close()
    assert threads() == []
    assert len(engine.cancelled) == 8
    assert collector._buffer.occupied == 0
    with pytest.raises(RolloutError, match="is closed"):
        collector.next_groups(0, 0, lambda: None)
    collector.publish_version(1)


@pytest.mark.parametrize("opened", [False, True])
def test_close_before_anything_ran(build, opened: bool) -> None:
    collector, _ = build()
    if opened:
        collector.open()
        assert threads() == ["rollout-collector"]
    collector.close()
    assert threads() == []
    with pytest.raises(RolloutError, match="is closed"):
        collector.open()
    with pytest.raises(RolloutError, match="is closed"):
        collector.start(0, 0)


def test_close_wakes_a_trainer_that_waits(build, until) -> None:
    engine = FakeEngine(holds=lambda request: True)
    collector, _ = build(engine)
    collector.start(0, 0)
    raised: list[BaseException] = []

    def trainer() -> None:
        try:
            collector.next_groups(0, 0, lambda: None, poll_s=3600)
        except RolloutError as error:
            raised.append(error)

    thread = threading.Thread(target=trainer, daemon=True)
    thread.start()
    until(lambda: len(engine.held) == 8)
    collector.close()
    thread.join(10)
    assert len(raised) == 1


def test_close_does_not_wait_for_a_task_that_ignores_its_cancellation(build, until, monkeypatch, caplog) -> None:
    from lightning_ppo.rollout import loop_thread

    free = threading.Event()
    collector, engine = build(reward=lambda response: float(free.wait(20)))
    collector.start(0, 0)
    until(lambda: len(engine.requests) > 0)
    close = loop_thread.LoopThread.close
    monkeypatch.setattr(loop_thread.LoopThread, "close", lambda self: close(self, timeout_s=0.05))
    collector.close()
    assert "did not end within 0.05 s" in caplog.text
    free.set()
    until(lambda: threads() == [])
