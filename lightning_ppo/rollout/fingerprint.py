"""Proof of a refit: every replica answers a probe, and the trainer's policy gives its tokens the same log-probs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.errors import EngineError
from lightning_ppo.rollout.engine import Generation, GenerationRequest, SamplingParams

PROBE_TOKENS = 2
"""The first comes from the prefill, the second from a decode step; more would only take longer."""


def probe_request(
    prompt: Prompt, policy_version: int, temperature: float, max_response_tokens: int = PROBE_TOKENS
) -> GenerationRequest:
    """Make the request that every replica answers after a refit.

    Args:
        prompt: Any prompt of the data set.
        policy_version: The version that was sent.
        temperature: Training's, so that the probe takes the same way through the sampler.
        max_response_tokens: Training's: engines have no room for more behind a prompt.
    """
    sampling = SamplingParams(min(PROBE_TOKENS, max_response_tokens), temperature)
    return GenerationRequest(f"probe_version{policy_version}", prompt.token_ids, sampling, seed=policy_version)


def probe_rows(request: GenerationRequest, answers: Mapping[str, Generation]) -> dict[str, Trajectory]:
    """Turn the answers into rows that a policy can score, by the replicas' names."""
    return {
        name: Trajectory(
            sample_id=f"{request.request_id}_{name}",
            prompt_ids=torch.tensor(request.prompt_ids, dtype=torch.int64),
            response_ids=torch.tensor(answer.token_ids, dtype=torch.int64),
            response_mask=torch.ones(len(answer.token_ids), dtype=torch.bool),
            rollout_logprobs=torch.tensor(answer.logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(answer.policy_versions, dtype=torch.int64),
            reward=0.0,
            finish_reason=answer.finish_reason,
            response_text="",
        )
        for name, answer in answers.items()
    }


def check_fingerprint(
    names: Sequence[str], rows: Sequence[Trajectory], logprobs: Sequence[Tensor], policy_version: int, tolerance: float
) -> float:
    """Compare what the replicas serve with what the trainer has.

    Args:
        names: The replicas.
        rows: Their answers, see `probe_rows`.
        logprobs: The trainer's log-probs of each answer, `[T]`, at the same temperature.
        policy_version: The version that was sent.
        tolerance: Largest difference of two log-probs that is accepted.

    Returns:
        The largest difference.

    Raises:
        EngineError: a replica serves another version or other weights; the message names each of them.
    """
    wrong, largest = [], 0.0
    for name, row, expected in zip(names, rows, logprobs, strict=True):
        versions = sorted(set(row.policy_versions.tolist()))
        gap = float((row.rollout_logprobs - expected.float()).abs().max())
        largest = max(largest, gap)
        if versions != [policy_version]:
            wrong.append(f"{name} serves version {', '.join(map(str, versions))}")
        elif not gap <= tolerance:
            wrong.append(f"{name} differs by {gap:.2g} in a log-prob (at most {tolerance:g} is accepted)")
    if wrong:
        raise EngineError(
            f"policy_version={policy_version} is not what every replica serves: {'; '.join(wrong)}; look at the "
            "engine's log, or raise vllm.fingerprint_tolerance if its precision explains the difference"
        )
    return largest
