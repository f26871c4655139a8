"""The steps of a refit, on servers that only pretend."""

import threading

import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.file_transport import FileTransport
from lightning_ppo.rollout.vllm.control import Control
from lightning_ppo.rollout.vllm.weight_update import WeightUpdate

WEIGHTS = [(f"w{index}", torch.full((4,), float(index))) for index in range(4)]


@pytest.fixture
def update(transfer_folder):
    """Every tensor is a bucket of its own."""
    made = WeightUpdate(FileTransport(transfer_folder), torch.float32, 1, 10.0, clear_cache=True)
    yield made
    made.close()


def test_weights_are_copied_while_servers_get_ready(update, fake_server):
    fakes = [fake_server(), fake_server()]
    controls = [Control(fake.url) for fake in fakes]
    assert update.update(controls, WEIGHTS, 1) == {}
    began, all_taken = threading.Event(), threading.Event()

    def pause(body):
        began.set()
        return (200, {}) if all_taken.wait(5) else (500, {"detail": "nothing was copied meanwhile"})

    fakes[0].answers["/pause"] = pause

    def weights():
        for index, pair in enumerate(WEIGHTS):
            # a bucket is complete once one more tensor was asked for
            assert index < 2 or began.wait(5)
            yield pair
        all_taken.set()

    assert update.update(controls, weights(), 2) == {}
    assert update.version == 2
    for fake in fakes:
        assert fake.paths().count("/update_weights") == 2 * len(WEIGHTS)


def test_what_was_copied_while_servers_got_ready_is_sent_at_once(transfer_folder, fake_server):
    fake = fake_server()
    update = WeightUpdate(FileTransport(transfer_folder), torch.float32, 2**24, 10.0, clear_cache=True)
    # the first bucket has room for one of them
    weights = [(f"w{index}", torch.full((3 * 2**16,), float(index))) for index in range(4)]
    copied = threading.Event()
    fake.answers["/pause"] = lambda body: (200, {}) if copied.wait(5) else (500, {"detail": "nothing was copied"})

    def take():
        yield from weights
        copied.set()

    try:
        # the first update takes all tensors before anything else
        assert update.update([], weights, 1) == {}
        assert update.update([Control(fake.url)], take(), 2) == {}
        assert fake.paths().count("/update_weights") == 1
    finally:
        update.close()


def test_weights_that_break_off_while_servers_get_ready_are_never_sent(update, fake_server):
    fake = fake_server()
    control = Control(fake.url)
    assert update.update([control], WEIGHTS, 1) == {}
    fake.calls.clear()
    with pytest.raises(EngineError, match="weights=w3 is missing"):
        update.update([control], WEIGHTS[:3], 2)
    assert update.is_torn
    assert update.version is None
    assert "/resume" not in fake.paths()
    with pytest.raises(EngineError, match="the last update was not completed"):
        update.push(control)


def test_complete_weights_of_a_failed_update_are_not_pushed_later(update, fake_server, transfer_folder):
    fake = fake_server()
    control = Control(fake.url)
    assert update.update([control], WEIGHTS, 1) == {}

    def pause(body):
        # by the time it answers everything is copied; then the shared folder is gone
        assert all_taken.wait(5)
        for folder in transfer_folder.iterdir():
            folder.rmdir()
        transfer_folder.rmdir()
        transfer_folder.write_text("no folder")
        return 200, {}

    all_taken = threading.Event()

    def weights():
        yield from WEIGHTS
        all_taken.set()

    fake.answers["/pause"] = pause
    with pytest.raises(EngineError, match="transfer_folder="):
        update.update([control], weights(), 2)
    assert update.version is None
