"""The policy: log-probs of response tokens under a causal language model, without ever holding all logits.

Shapes: `b` rows, `T` response tokens, `N` generated tokens of the micro-batch, `V` vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_ppo.models.frozen_mode import EvalModeModule
from lightning_ppo.models.micro_batch import MicroBatch

LOGITS_PER_SLICE = 2**24
"""Most logits held at once; above it they are recomputed slice by slice in the backward pass."""


class PolicyModel(EvalModeModule):
    """A causal language model as a policy.

    Dropout stays off in training too, so that the training forward is the distribution that was sampled from.

    Args:
        model: Any Hugging Face causal language model.
        temperature: The sampling temperature; logits are divided by it, as the engine does.
    """

    completed_steps: Tensor
    """PPO steps that this model went through, scalar int64; travels with its weights."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.register_buffer("completed_steps", torch.zeros((), dtype=torch.long))
        self._head_is_last: bool | None = None
        self.train(False)

    @override
    def forward(self, batch: MicroBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Compute the log-prob of every generated token, and the entropy of the distribution it came from.

        Args:
            batch: Rows on this model's device.
            with_entropy: Whether the entropy is needed.

        Returns:
            `[b, T]` float32 log-probs and, if asked for, `[b, T]` float32 entropies; 0 where `batch.mask` is False.
        """
        if self._head_is_last is None:
            self._head_is_last = self._logits_are_head_of_hidden(batch.input_ids[:1, :2])
        rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)[:, None].expand_as(batch.mask)
        row, position = rows[batch.mask], batch.state_index[batch.mask]
        targets = batch.response_ids[batch.mask]
        if self._head_is_last:
            states = self._hidden(batch.input_ids)[row, position]
            logprobs, entropy = self._by_slice(self._output_layer(), states, targets, with_entropy)
        else:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[row, position]
            logprobs, entropy = self._by_slice(None, logits, targets, with_entropy)
        zeros = torch.zeros(batch.mask.shape, dtype=logprobs.dtype, device=logprobs.device)
        scattered = zeros.masked_scatter(batch.mask, logprobs)
        return scattered, zeros.masked_scatter(batch.mask, entropy) if with_entropy else None

    def _output_layer(self) -> nn.Module | None:
        return self.model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def _hidden(self, input_ids: Tensor) -> Tensor:
        return self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _logits_are_head_of_hidden(self, input_ids: Tensor) -> bool | None:
        """Whether logits are just the output layer on the last hidden state; None while that cannot be told."""
        head = self._output_layer()
        if head is None or self.model.base_model is self.model:
            return False
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        if not bool(logits.any()):
            # some models scale or cap their logits, and zeros look the same before and after
            return None
        return torch.equal(head(self._hidden(input_ids)).float(), logits.float())

    def _by_slice(
        self, head: nn.Module | None, states: Tensor, targets: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        size = max(1, LOGITS_PER_SLICE // int(self.model.config.vocab_size))
        run: Callable[..., tuple[Tensor, Tensor]] = _logprobs
        arguments = (head, self.temperature, with_entropy)
        if len(states) <= size:
            return run(states, targets, *arguments)
        parts = [
            checkpoint(run, state, target, *arguments, use_reentrant=False)
            if torch.is_grad_enabled()
            else run(state, target, *arguments)
            for state, target in zip(torch.split(states, size), torch.split(targets, size), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _logprobs(
    states: Tensor, targets: Tensor, head: nn.Module | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """`[N, d]` states, or logits without a head, to `[N]` log-probs and `[N]` entropies (empty unless asked for)."""
    logits = states if head is None else head(states)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    if not with_entropy:
        return logprobs, logprobs.new_empty(0)
    expected_logit = (torch.softmax(logits, -1) * logits).sum(-1)
    return logprobs, log_normalizer - expected_logit
