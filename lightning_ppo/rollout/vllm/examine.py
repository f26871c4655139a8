"""Whether a server can serve this run: checked before training, one line for each thing that is wrong."""

import re

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.compatibility import EXPECTED, expected_policy
from lightning_ppo.rollout.engine import PolicySpec
from lightning_ppo.rollout.vllm.control import Control, RefusedError

OLDEST = (0, 32)
"""The first version of vLLM that reports the weight version of every token."""


def examine(control: Control, spec: PolicySpec, dtype: str, timeout_s: float) -> None:
    """Check one server that is up.

    Args:
        control: The line to it.
        spec: The policy.
        dtype: Precision that its weights should have, by torch's name.
        timeout_s: Deadline of each question.

    Raises:
        EngineError: it cannot serve this run; the message says why, and what to start it with.
    """
    name = control.name
    version = control.vllm_version(timeout_s)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise EngineError(
            f"server {name} runs vLLM {version}, which is too old for the weight-update interface;"
            " install vllm==0.32.* there"
        )
    try:
        is_sleeping = control.is_sleeping(timeout_s)
    except RefusedError as error:
        raise EngineError(
            f"server {name} does not offer weight updates ({error.status}); start it with VLLM_SERVER_DEV_MODE=1"
        ) from None
    if is_sleeping:
        raise EngineError(f"server {name} sleeps; wake it (POST /wake_up) before the run starts")
    if not control.takes_token_ids(timeout_s):
        raise EngineError(f"server {name} does not take requests in token ids; start it with --enable-scale-out")
    expected = expected_policy(spec.config_json, dtype, spec.max_context_tokens)
    try:
        control.connect({EXPECTED: expected}, timeout_s)
    except RefusedError as error:
        reason = error.reason
        if "init_info" in reason or "weight_transfer_config" in reason or "not configured" in reason.lower():
            raise EngineError(
                f"server {name} does not use our weight transfer ({reason}); install lightning_ppo there, and start it"
                """ with --weight-transfer-config '{"backend":"lightning_ppo"}'"""
            ) from None
        raise EngineError(f"server {name}: {reason}") from None
