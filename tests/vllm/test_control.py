"""The control plane against servers that fail in every way we know of."""

import threading
import time

import pytest

from lightning_ppo.errors import EngineDiedError, EngineError
from lightning_ppo.rollout.engine import PolicySpec
from lightning_ppo.rollout.vllm.control import Control, RefusedError, SilentError, describe_error
from lightning_ppo.rollout.vllm.examine import examine
from lightning_ppo.rollout.vllm.open_files import OpenFilesError

CALLS = {
    "pause": lambda control, limit: control.pause(limit),
    "resume": lambda control, limit: control.resume(limit),
    "connect": lambda control, limit: control.connect({"backend": "gloo"}, limit),
    "start_update": lambda control, limit: control.start_update(limit),
    "update": lambda control, limit: control.update({"kind": "file"}, limit),
    "finish_update": lambda control, limit: control.finish_update(3, limit),
    "set_version": lambda control, limit: control.set_version(3, limit),
    "sleep": lambda control, limit: control.sleep(limit),
    "wake": lambda control, limit: control.wake(limit),
    "health": lambda control, limit: control.health(limit),
}
EXPECTED = {
    "pause": ("/pause?mode=keep&clear_cache=true", None),
    "resume": ("/resume", None),
    "connect": ("/init_weight_transfer_engine", {"init_info": {"message": {"backend": "gloo"}}}),
    "start_update": ("/start_weight_update", None),
    "update": ("/update_weights", {"update_info": {"message": {"kind": "file"}}}),
    "finish_update": ("/finish_weight_update", {"weight_version": "3"}),
    "set_version": ("/update_weight_version", {"new_version": "3"}),
    "sleep": ("/sleep?level=2", None),
    "wake": ("/wake_up", None),
    "health": ("/health", None),
}


def everything(fake, answer):
    for path, _ in EXPECTED.values():
        fake.answers[path.partition("?")[0]] = answer


@pytest.mark.parametrize("name", CALLS)
def test_what_is_asked(name, fake_server):
    fake = fake_server()
    everything(fake, (200, {}))
    CALLS[name](Control(fake.url), 5.0)
    assert fake.calls == [EXPECTED[name]]


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_carries_the_reason(name, fake_server):
    fake = fake_server()
    everything(fake, (500, {"error": {"message": "Call to collective_rpc method failed: no\nroom"}}))
    with pytest.raises(RefusedError, match="server number seven answered") as caught:
        CALLS[name](Control(fake.url, "number seven"), 5.0)
    assert (caught.value.status, caught.value.reason) == (500, "no room")
    assert "\n" not in str(caught.value)
    assert EXPECTED[name][0].partition("?")[0] in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_not_answered_ends_in_time(name, fake_server):
    fake = fake_server()
    everything(fake, fake.hang)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer .* in time \(0.3 s\)") as caught:
        CALLS[name](Control(fake.url), 0.3)
    assert time.monotonic() - start < 10
    assert type(caught.value) is SilentError


@pytest.mark.parametrize("name", CALLS)
def test_a_server_that_is_not_there(name, fake_server):
    fake = fake_server()
    fake.close()
    with pytest.raises(EngineDiedError, match="is not reachable"):
        CALLS[name](Control(fake.url), 5.0)


def test_a_connection_that_is_cut(fake_server):
    fake = fake_server()
    fake.answers["/resume"] = lambda body: None
    with pytest.raises(EngineDiedError, match="is not reachable for POST /resume"):
        Control(fake.url).resume(5.0)
    fake.answers["/resume"] = (200, fake.cut(b'{"status": "resumed"}'))
    with pytest.raises(EngineDiedError, match="is not reachable for POST /resume"):
        Control(fake.url).resume(5.0)


def test_a_call_that_a_dead_engine_never_answers_ends_with_the_health(fake_server):
    """vLLM 0.32: the engine dies while a bucket is loaded, and the call hangs for ever."""
    fake = fake_server()
    fake.answers["/update_weights"] = fake.hang
    fake.answers["/health"] = (503, {})
    start = time.monotonic()
    with pytest.raises(EngineDiedError, match="died during POST /update_weights"):
        Control(fake.url).update({}, 25.0)
    assert time.monotonic() - start < 20


def test_a_call_that_takes_its_time_is_waited_for(fake_server):
    fake = fake_server()

    def slow(body):
        time.sleep(2.5)
        return 200, {}

    fake.answers["/update_weights"] = slow
    fake.answers["/health"] = fake.hang
    Control(fake.url).update({}, 25.0)


def test_a_call_beside_a_thousand_open_files(fake_server, open_files):
    """A request in flight is one."""
    fake = fake_server()
    with open_files(1100):
        assert Control(fake.url).vllm_version(5.0) == "0.32.0"


@pytest.mark.parametrize("name", CALLS)
def test_a_process_that_may_open_no_more_files_does_not_blame_the_server(name, fake_server, open_files):
    fake = fake_server()
    with open_files(), pytest.raises(OpenFilesError, match=r"open files=\d+ is the limit .* ulimit -n") as caught:
        CALLS[name](Control(fake.url), 5.0)
    assert not isinstance(caught.value, EngineDiedError)
    assert "\n" not in str(caught.value)


def test_no_time_left(fake_server):
    with pytest.raises(EngineError, match=r"was given no time for POST /resume; raise vllm.update_timeout_s"):
        Control(fake_server().url).resume(0.0)


def test_something_else_than_vllm(fake_server):
    fake = fake_server()
    fake.answers["/version"] = (200, b"<html>")
    with pytest.raises(EngineError, match="is it vLLM"):
        Control(fake.url).vllm_version(5.0)


def test_path_and_key_are_kept(fake_server):
    fake = fake_server()
    fake.answers["/behind/proxy/version"] = (200, {"version": "0.32.1"})
    assert Control(f"{fake.url}/behind/proxy/", api_key="secret").vllm_version(5.0) == "0.32.1"


def test_calls_of_several_threads_do_not_wait_for_each_other(fake_server):
    fake = fake_server()
    fake.answers["/update_weights"] = fake.hang
    control = Control(fake.url)

    def update():
        with pytest.raises(EngineError, match="in time"):
            control.update({}, 1.0)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert control.vllm_version(5.0) == "0.32.0"
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no reason given"),
        (b"plain\ntext", "plain text"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "paused"}', "paused"),
        (b'{"error": {"message": "x", "code": 4}}', "x"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"x" * 900, "x" * 400),
    ],
)
def test_reasons(body, reason):
    assert describe_error(body) == reason


SPEC = PolicySpec('{"model_type": "llama", "vocab_size": 90, "hidden_size": 64}', 128)


def test_a_fitting_server_passes(fake_server):
    fake = fake_server()
    examine(Control(fake.url), SPEC, "float32", 5.0)
    ((_, body),) = [call for call in fake.calls if call[0] == "/init_weight_transfer_engine"]
    assert body["init_info"]["message"]["expected"] == {
        "config": {"model_type": "llama", "vocab_size": 90, "hidden_size": 64},
        "dtype": "float32",
        "max_context_tokens": 128,
    }


def reason(text):
    return 500, {"error": {"message": f"Call to collective_rpc method failed: {text}"}}


@pytest.mark.parametrize(
    ("path", "answer", "line"),
    [
        ("/version", (200, {"version": "0.31.2"}), "vLLM 0.31.2, which is too old .* install vllm==0.32"),
        ("/version", (200, {}), "vLLM unknown, which is too old"),
        ("/is_sleeping", (404, {"detail": "Not Found"}), "start it with VLLM_SERVER_DEV_MODE=1"),
        ("/is_sleeping", (200, {"is_sleeping": True}), "sleeps; wake it"),
        ("/inference/v1/generate", (403, {}), "start it with --enable-scale-out"),
        ("/init_weight_transfer_engine", reason("vocab_size=91 is served"), r"server http.*: vocab_size=91 is served"),
        (
            "/init_weight_transfer_engine",
            reason("Invalid init_info for NCCLWeightTransferEngine"),
            "does not use our weight transfer .* start it with --weight-transfer-config",
        ),
        (
            "/init_weight_transfer_engine",
            reason("Weight transfer not configured."),
            "does not use our weight transfer .* start it with --weight-transfer-config",
        ),
    ],
)
def test_a_server_that_does_not_fit(path, answer, line, fake_server):
    fake = fake_server()
    fake.answers[path] = answer
    with pytest.raises(EngineError, match=line) as caught:
        examine(Control(fake.url), SPEC, "float32", 5.0)
    assert "\n" not in str(caught.value)
    assert fake.url in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "dtype", "context", "line"),
    [
        ({"vocab_size": 91}, "float32", 384, "vocab_size=90 is served, but the policy has 91"),
        ({"num_hidden_layers": 3}, "float32", 384, "num_hidden_layers=2 is served, but the policy has 3"),
        ({"tie_word_embeddings": True}, "float32", 384, "tie_word_embeddings=False is served"),
        ({}, "bfloat16", 384, "dtype=float32 is served, but vllm.dtype is bfloat16"),
        ({}, "float32", 385, "max_model_len=384 is shorter than the 385 tokens"),
    ],
)
def test_the_real_server_compares_the_policy(changes, dtype, context, line, url, make_spec):
    examine(Control(url), make_spec(), "float32", 30.0)
    with pytest.raises(EngineError, match=line):
        examine(Control(url), make_spec(context=context, **changes), dtype, 30.0)
