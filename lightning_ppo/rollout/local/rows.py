"""State of the responses being sampled: one row each, kept in numpy arrays so that a step costs no loop over rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_ppo.rollout.local.protocol import Finished, Submit
from lightning_ppo.rollout.local.sampling import RowRules, sample


class RowTable:
    """`R` rows, each free or holding one response that is being sampled.

    Attributes:
        active: `[R]` bool, rows in use.
        last: `[R]` int64, the token that the model must read next; 0 in free rows.
        position: `[R]` int64, where that token stands in its sequence; 0 in free rows.
        all_rows: `[R]`, every row's number.
    """

    def __init__(self, num_rows: int, max_context_tokens: int, vocab_size: int) -> None:
        self._context = max_context_tokens
        self._vocab = vocab_size
        self.all_rows = np.arange(num_rows)
        self.active = np.zeros(num_rows, dtype=bool)
        self.last = np.zeros(num_rows, dtype=np.int64)
        self.position = np.zeros(num_rows, dtype=np.int64)
        self._keys = np.zeros(num_rows, dtype=np.int64)
        self._count = np.zeros(num_rows, dtype=np.int64)
        self._limit = np.ones(num_rows, dtype=np.int64)
        self._temperature = np.ones(num_rows, dtype=np.float32)
        self._greedy = np.zeros(num_rows, dtype=bool)
        self._top_k = np.full(num_rows, vocab_size, dtype=np.int64)
        self._top_p = np.ones(num_rows)
        self._stops = np.full((num_rows, 1), -1, dtype=np.int64)
        shape = (num_rows, max_context_tokens)
        self._uniforms = np.full(shape, 0.5)
        self._tokens = np.zeros(shape, dtype=np.int64)
        self._logprobs = np.zeros(shape, dtype=np.float32)
        self._versions = np.zeros(shape, dtype=np.int64)
        self._generator = torch.Generator()
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._rules: RowRules | None = None
        self._in_use: np.ndarray | None = None

    @property
    def has_free(self) -> bool:
        """Whether another response fits."""
        return bool(self._free)

    @property
    def in_use(self) -> np.ndarray:
        """Numbers of the rows in use, ascending."""
        if self._in_use is None:
            self._in_use = np.flatnonzero(self.active)
        return self._in_use

    def place(self, submit: Submit) -> int:
        """Take a free row for this request and return its number. All its random numbers are drawn here."""
        request, row = submit.request, self._free.pop()
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._context - len(request.prompt_ids))
        self._generator.manual_seed(request.seed)
        self._uniforms[row, :limit] = torch.rand(limit, generator=self._generator, dtype=torch.float64).numpy()
        self._keys[row], self._count[row], self._limit[row] = submit.key, 0, limit
        self.last[row], self.position[row] = request.prompt_ids[-1], len(request.prompt_ids) - 1
        self._greedy[row] = sampling.temperature == 0
        self._temperature[row] = sampling.temperature or 1.0
        self._top_k[row] = min(sampling.top_k or self._vocab, self._vocab)
        self._top_p[row] = sampling.top_p
        self._set_stops(row, sampling.stop_token_ids)
        self._row_of[submit.key] = row
        self.active[row] = True
        self._changed()
        return row

    def abort(self, key: int) -> bool:
        """Free the row of this request; False if it has none."""
        row = self._row_of.get(key)
        if row is None:
            return False
        self._release([row])
        return True

    def advance(self, logits: Tensor, rows: np.ndarray, version: int) -> Finished | None:
        """Sample the next token of these rows and return those that ended; they are free afterwards.

        Args:
            logits: `[len(rows), V]` float32; what stands in free rows is ignored.
            rows: `[n]`, ascending: every row, or any that include all rows in use.
            version: Policy version the logits come from.

        Raises:
            FloatingPointError: a row in use has logits that are not finite.
        """
        uniforms = self._uniforms[rows, self._count[rows]]
        device_tokens, device_logprobs = sample(
            logits, self._rules_for(rows, logits.device), torch.from_numpy(uniforms).to(logits.device)
        )
        tokens, logprobs = device_tokens.cpu().numpy(), device_logprobs.cpu().numpy()
        used = self.in_use
        if len(rows) != len(used):
            chosen = self.active[rows]
            tokens, logprobs = tokens[chosen], logprobs[chosen]
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"policy version {version} gives logits that are not finite; lower the learning rate"
            )
        count = self._count[used]
        self._tokens[used, count] = tokens
        self._logprobs[used, count] = logprobs
        self._versions[used, count] = version
        self._count[used] = count + 1
        self.last[used] = tokens
        self.position[used] += 1
        stopped = (self._stops[used] == tokens[:, None]).any(1)
        ended = stopped | (count + 1 == self._limit[used])
        return self._finish(used[ended], stopped[ended]) if ended.any() else None

    def _finish(self, rows: np.ndarray, stopped: np.ndarray) -> Finished:
        lengths = self._count[rows]
        finished = Finished(
            keys=tuple(self._keys[rows].tolist()),
            lengths=tuple(lengths.tolist()),
            stopped=tuple(stopped.tolist()),
            token_ids=np.concatenate([self._tokens[row, :n] for row, n in zip(rows, lengths, strict=True)]),
            logprobs=np.concatenate([self._logprobs[row, :n] for row, n in zip(rows, lengths, strict=True)]),
            versions=np.concatenate([self._versions[row, :n] for row, n in zip(rows, lengths, strict=True)]),
        )
        self._release(rows.tolist())
        return finished

    def _release(self, rows: list[int]) -> None:
        for row in rows:
            del self._row_of[int(self._keys[row])]
        self.active[rows] = False
        self.last[rows] = self.position[rows] = self._count[rows] = 0
        self._temperature[rows], self._greedy[rows] = 1, False
        self._top_k[rows], self._top_p[rows] = self._vocab, 1
        self._free.extend(rows)
        self._changed()

    def _changed(self) -> None:
        self._rules = None
        self._in_use = None

    def _set_stops(self, row: int, stops: Sequence[int]) -> None:
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), -1, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops

    def _rules_for(self, rows: np.ndarray, device: torch.device) -> RowRules:
        whole = rows is self.all_rows
        if whole and self._rules is not None:
            return self._rules
        greedy, top_k, top_p = self._greedy[rows], self._top_k[rows], self._top_p[rows]
        filtered = np.flatnonzero(((top_k < self._vocab) | (top_p < 1)) & ~greedy)
        some = len(filtered) > 0
        rules = RowRules(
            temperature=torch.from_numpy(self._temperature[rows])[:, None].to(device),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            all_greedy=bool(greedy[self.active[rows]].all()),
            filtered=torch.from_numpy(filtered).to(device) if some else None,
            top_k=torch.from_numpy(top_k[filtered])[:, None].to(device) if some else None,
            top_p=torch.from_numpy(top_p[filtered])[:, None].to(device) if some else None,
        )
        if whole:
            self._rules = rules
        return rules
