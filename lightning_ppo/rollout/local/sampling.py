"""Sample one token per row, each row by its own rules. No row's bits depend on what the other rows ask for.

Every reduction runs along a row, and elementwise work is limited to operations that round the same way in vector and in
scalar code: those with a polynomial inside (exp, silu) do not, and would treat the last elements of a batch
differently.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NEVER = float("-inf")


@dataclass(frozen=True)
class RowRules:
    """Sampling rules of `R` rows, as tensors on the device of the logits."""

    temperature: Tensor
    """`[R, 1]` float32; 1 for greedy rows."""
    greedy: Tensor | None
    """`[R]` bool; None when no row is greedy."""
    all_greedy: bool
    filtered: Tensor | None
    """`[F]` int64, the rows with a top-k or top-p filter; None when there is none."""
    top_k: Tensor | None
    """`[F, 1]` int64; the vocabulary's size where off."""
    top_p: Tensor | None
    """`[F, 1]` float64."""


def sample(logits: Tensor, rules: RowRules, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token in every row by inverting the distribution function at the row's uniform number.

    Greedy rows take the most likely token and ignore their filters.

    Args:
        logits: `[R, V]` float32.
        rules: Temperature and filters of each row.
        uniforms: `[R]` float64 in [0, 1).

    Returns:
        Tokens `[R]` int64, and their log-probs `[R]` float32 under the distribution they were sampled from: tempered,
        filtered and renormalised over the tokens that are left (greedy rows: at temperature 1, unfiltered).
    """
    scaled = logits / rules.temperature
    if rules.filtered is not None and rules.top_k is not None and rules.top_p is not None:
        scaled[rules.filtered] = filter_logits(scaled[rules.filtered], rules.top_k, rules.top_p)
    if rules.all_greedy:
        tokens = scaled.argmax(-1)
    else:
        tokens = _invert(scaled, uniforms)
        if rules.greedy is not None:
            tokens = torch.where(rules.greedy, scaled.argmax(-1), tokens)
    logprobs = scaled.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    return tokens, logprobs


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the logits of filtered tokens to minus infinity: top-k first, then top-p over what is left.

    Top-k keeps the k most likely tokens; of equal ones the lower ids. Top-p keeps the smallest set of most likely
    tokens whose probability reaches p, at least one token.

    Args:
        logits: `[F, V]` float32.
        top_k: `[F, 1]` int64, at least 1.
        top_p: `[F, 1]` float64 in (0, 1].

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, equation 2 (top-p).
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, _NEVER)
    mass = ordered.double().softmax(-1)
    before = mass.cumsum(-1) - mass
    # p = 1 must keep everything, also where rounding carries the sum to 1 before the last token.
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), _NEVER)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _invert(scaled: Tensor, uniforms: Tensor) -> Tensor:
    total = scaled.double().softmax(-1).cumsum_(-1)
    top = total[:, -1]
    # Rounding may carry u * top up to top itself, past the last token with any probability.
    target = torch.minimum(uniforms * top, torch.nextafter(top, torch.zeros_like(top)))
    tokens = torch.searchsorted(total, target[:, None], right=True).squeeze(1)
    # Only NaN gets past the end; the caller sees it in the log-prob.
    return tokens.clamp_(max=scaled.shape[-1] - 1)
