"""Every way out of a run closes the engine once, and leaves nothing behind."""

import os
import signal
import threading

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_ppo as ppo
from lightning_ppo.testing import FakeEngine


class Boom(RuntimeError):
    pass


class CountingEngine(FakeEngine):
    """Counts starts and closes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.starts = self.closes = 0

    def start(self, spec):
        super().start(spec)
        self.starts += 1

    def close(self):
        super().close()
        self.closes += 1


@pytest.fixture(autouse=True)
def _restore_signals():
    """Lightning ignores SIGINT after an interrupt; the tests that follow must not."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "rollout-collector"]


def assert_clean(run, closes=1):
    assert run.fake.closes == closes
    assert threads() == []
    assert run.trainer.accumulate_grad_batches == 1
    assert run.trainer.limit_train_batches == 1.0
    assert run.trainer.strategy.open_step is None


def raising(hook, error):
    def method(self, trainer, *_, **__):
        # validation also runs in the sanity check, which has hooks of its own
        if not trainer.sanity_checking or "sanity" in hook:
            raise error

    return type("Raising", (ppo.PPOCallback,), {hook: method})()


VALIDATION = [{"prompt": "^ab="}, {"prompt": "^cd="}]


def test_success(make_run):
    run = make_run(2, fake=CountingEngine(), validation_prompts=VALIDATION, num_sanity_val_steps=2)
    run.fit()
    assert run.fake.starts == 1
    assert_clean(run)


STAGES = [
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_chunk_ready",
    "on_chunk_end",
    "on_before_policy_step",
    "on_refit_end",
    "on_critic_epoch_end",
    "on_ppo_step_end",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize("hook", STAGES)
def test_exception_in_every_stage(make_run, hook):
    run = make_run(
        1,
        fake=CountingEngine(),
        validation_prompts=VALIDATION,
        num_sanity_val_steps=1,
        callbacks=[raising(hook, Boom(hook))],
    )
    with pytest.raises(Boom, match=hook):
        run.fit()
    assert_clean(run)


def test_exception_in_setup(make_run):
    """Whatever fails before there is an engine has none to close."""
    run = make_run(1, fake=CountingEngine(), callbacks=[raising("setup", Boom("setup"))])
    with pytest.raises(Boom):
        run.fit()
    assert run.fake.starts == 0
    assert threads() == []


def test_engine_that_does_not_start_is_closed(make_run):
    class Stillborn(CountingEngine):
        def start(self, spec):
            raise Boom("no port")

    run = make_run(1, fake=Stillborn())
    with pytest.raises(Boom, match="no port"):
        run.fit()
    assert_clean(run)


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_chunk_end", "on_refit_end", "on_validation_start"])
def test_keyboard_interrupt(make_run, hook):
    """Lightning turns it into an exit with status 1."""
    run = make_run(
        2,
        fake=CountingEngine(),
        validation_prompts=VALIDATION,
        num_sanity_val_steps=1,
        callbacks=[raising(hook, KeyboardInterrupt())],
    )
    with pytest.raises(SystemExit) as caught:
        run.fit()
    assert caught.value.code == 1
    assert_clean(run)


class SendSignal:
    """Sends a signal to this process once the engine holds a request of some draw."""

    def __init__(self, fake, prefix, number):
        self.fake, self.prefix, self.number = fake, prefix, number
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.stop = threading.Event()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(5)

    def _send(self):
        while not self.stop.wait(0.02):
            if any(name.startswith(self.prefix) for name in self.fake.held):
                # long enough for the trainer to be waiting
                if not self.stop.wait(0.2):
                    os.kill(os.getpid(), self.number)
                return


def held(prefix):
    return CountingEngine(holds=lambda request: request.request_id.startswith(prefix))


@pytest.mark.parametrize("draw", [3, 6])
def test_sigterm_while_waiting_for_a_chunk(make_run, cut, draw):
    """The wait ends long before its deadline: else the error would be the deadline's."""
    fake = held(f"draw{draw}_")
    run = make_run(3, rollout={**cut(2, 2), "timeout_s": 3.0}, fake=fake)
    before = signal.getsignal(signal.SIGTERM)
    with SendSignal(fake, f"draw{draw}_", signal.SIGTERM), pytest.raises(SIGTERMException):
        run.fit()
    assert run.trainer.global_step == draw // 4
    assert signal.getsignal(signal.SIGTERM) == before
    assert not run.module.policy_update.accumulator.is_open
    assert_clean(run)


def test_sigterm_while_validation_waits(make_run):
    fake = held("validation")
    run = make_run(1, rollout={"timeout_s": 3.0}, fake=fake, validation_prompts=VALIDATION)
    with SendSignal(fake, "validation", signal.SIGTERM), pytest.raises(SIGTERMException):
        run.fit()
    assert_clean(run)


def test_ctrl_c_while_waiting_for_a_chunk(make_run):
    fake = held("draw3_")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = make_run(1, rollout={"timeout_s": 3.0}, fake=fake)
    with SendSignal(fake, "draw3_", signal.SIGINT), pytest.raises(SystemExit):
        run.fit()
    assert_clean(run)


def test_requests_in_flight_are_cancelled(make_run):
    """The run ends while the next step's responses are being generated; nobody waits for them."""
    fake = held("draw4_")
    run = make_run(1, fake=fake)
    run.fit()
    assert {name.split("_")[0] for name in fake.cancelled} == {"draw4"}
    assert_clean(run)


def test_second_fit_on_the_same_trainer_continues(make_run):
    draws = []

    class Follow(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            draws.append((payload.chunk.ppo_step, payload.chunk.draws))

    run = make_run(2, fake=CountingEngine(), callbacks=[Follow()])
    run.fit()
    run.trainer.fit_loop.max_epochs = 4
    run.fit()
    assert run.trainer.global_step == run.trainer.current_epoch == 4
    assert draws == [(step, tuple(range(4 * step, 4 * step + 4))) for step in range(4)]
    # the second run announces the version that the first one reached
    assert run.fake.versions == [0, 1, 2, 2, 3, 4]
    assert (run.fake.starts, run.fake.closes) == (2, 2)
    assert threads() == []


def test_save_after_fit_knows_where_the_prompts_are(make_run, tmp_path):
    """Rollouts are closed by then; a resumed run still continues with the first untrained prompt."""
    run = make_run(2)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    draws = []

    class Follow(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            draws.extend(payload.chunk.draws)

    resumed = make_run(3, callbacks=[Follow()])
    resumed.fit(tmp_path / "two.ckpt")
    assert draws == [8, 9, 10, 11]


def test_fit_then_validate_then_predict(make_run):
    run = make_run(1, fake=CountingEngine(), validation_prompts=VALIDATION)
    run.fit()
    (metrics,) = run.trainer.validate(run.module, run.data, verbose=False)
    (rows,) = run.trainer.predict(run.module, run.data)
    assert metrics["val/reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 2, abs=1.0)
    assert len(rows) == 2
    assert (run.fake.starts, run.fake.closes) == (3, 3)
    policy = run.module.policy.model.state_dict()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in run.fake.weights.items())
    assert threads() == []


def test_exception_in_validate_closes_the_engine(make_run):
    run = make_run(
        1, fake=CountingEngine(), validation_prompts=VALIDATION, callbacks=[raising("on_validation_batch_end", Boom())]
    )
    with pytest.raises(Boom):
        run.trainer.validate(run.module, run.data)
    assert run.fake.closes == 1
    assert threads() == []


@pytest.mark.parametrize("fails", [False, True])
def test_thread_count_is_restored(make_run, fails):
    seen = []

    class Look(ppo.PPOCallback):
        def on_chunk_ready(self, trainer, pl_module, payload):
            seen.append(torch.get_num_threads())
            if fails:
                raise Boom

    run = make_run(1, callbacks=[Look()])
    run.data.engine_config = ppo.LocalEngineConfig(trainer_threads=2)
    try:
        run.fit()
    except Boom:
        assert fails
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_validation_of_another_trainer_leaves_the_prompt_position(make_run):
    """A validation has a collector of its own, which has trained nothing."""
    import lightning as L

    import lightning_ppo as ppo

    run = make_run(2, validation_prompts=[{"prompt": "^ab="}])
    run.fit()
    before = run.data.position()
    other = L.Trainer(strategy=ppo.StreamingPPOStrategy(), accelerator="cpu", logger=False, enable_progress_bar=False)
    other.validate(run.module, run.data, verbose=False)
    assert run.data.position() == before
    assert before["stream"]["cursor"] == 8
