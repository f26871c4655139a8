import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.engine import Generation
from lightning_ppo.rollout.fingerprint import PROBE_TOKENS, check_fingerprint, probe_request, probe_rows
from lightning_ppo.testing import make_prompt

REQUEST = probe_request(make_prompt(), policy_version=7, temperature=0.6)


def answer(version: int = 7, logprobs: tuple[float, float] = (-1.0, -2.0)) -> Generation:
    return Generation(REQUEST.request_id, (6, 7), logprobs, "length", (version, version))


def check(answers: dict[str, Generation], tolerance: float = 1e-3) -> float:
    rows = probe_rows(REQUEST, answers)
    ours = [torch.tensor([-1.0, -2.0])] * len(rows)
    return check_fingerprint(tuple(rows), list(rows.values()), ours, 7, tolerance)


def test_a_probe_goes_through_the_sampler_of_training_and_a_decode_step() -> None:
    assert (REQUEST.sampling.temperature, REQUEST.sampling.max_tokens) == (0.6, PROBE_TOKENS)
    assert PROBE_TOKENS >= 2
    other = probe_request(make_prompt(), policy_version=8, temperature=0.6)
    assert other.request_id != REQUEST.request_id


def test_a_probe_is_no_longer_than_the_responses_that_the_engine_has_room_for() -> None:
    assert probe_request(make_prompt(), 7, 0.6, max_response_tokens=1).sampling.max_tokens == 1
    assert probe_request(make_prompt(), 7, 0.6, max_response_tokens=50).sampling.max_tokens == PROBE_TOKENS


def test_what_every_replica_serves_passes_with_the_largest_difference() -> None:
    gap = check({"server_0": answer(), "server_1": answer(logprobs=(-1.0, -2.0005))})
    assert gap == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (answer(version=6), "server_1 serves version 6"),
        (answer(logprobs=(-1.0, -2.1)), r"server_1 differs by 0\.1 in a log-prob"),
        (answer(logprobs=(-1.0, float("nan"))), "server_1 differs by nan"),
        (Generation(REQUEST.request_id, (6, 7), (-1.0, -2.0), "length", (6, 7)), "server_1 serves version 6, 7"),
    ],
)
def test_the_replica_that_serves_something_else_is_named(wrong: Generation, why: str) -> None:
    with pytest.raises(EngineError, match=rf"policy_version=7 is not what every replica serves: {why}[^\n]*; look"):
        check({"server_0": answer(), "server_1": wrong})
