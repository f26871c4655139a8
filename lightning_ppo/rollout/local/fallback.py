"""Any causal language model through transformers' own forward and cache: slower, and batches run to their end."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_ppo.rollout.local.protocol import Finished, Submit
from lightning_ppo.rollout.local.rows import RowTable
from lightning_ppo.rollout.local.skeleton import Skeleton, build_model
from lightning_ppo.rollout.local.waiting import WaitingRequests


class BatchScheduler(WaitingRequests):
    """Batches of waiting requests, left-padded; finished rows leave, new ones wait for the next batch."""

    def __init__(self, skeleton: Skeleton, rows: RowTable, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(rows)
        self._model = build_model(skeleton.config, dtype=dtype).to(device).eval().requires_grad_(False)
        self._tensors = self._model.state_dict()
        self._config = skeleton.config
        self._device = device
        accepted = inspect.signature(self._model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache: Any = None
        self._batch = np.empty(0, dtype=np.int64)
        self._attended = torch.empty(0)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights; responses in the batch go on with the cache they have."""
        with torch.inference_mode():
            for name, tensor in weights.items():
                self._tensors[name].copy_(tensor)

    @torch.inference_mode()
    def step(self, version: int) -> Finished | None:
        """Sample one token in every row of the batch and return the responses that ended, or None.

        Raises:
            FloatingPointError: the weights give logits that are not finite.
        """
        logits = self._continue() if len(self._rows.in_use) else self._begin()
        return None if logits is None else self._rows.advance(logits, self._batch, version)

    def _begin(self) -> Tensor | None:
        prompts: dict[int, tuple[int, ...]] = {}
        while self._waiting and self._rows.has_free:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            prompts[self._rows.place(Submit(key, request))] = request.prompt_ids
        if not prompts:
            return None
        self._batch = np.array(sorted(prompts))
        longest = max(map(len, prompts.values()))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        self._attended = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for index, row in enumerate(self._batch.tolist()):
            ids[index, longest - len(prompts[row]) :] = torch.tensor(prompts[row])
            self._attended[index, longest - len(prompts[row]) :] = 1
        self._attended = self._attended.to(self._device)
        self._cache = DynamicCache(config=self._config)
        positions = (self._attended.cumsum(-1) - 1).clamp_(min=0)
        return self._forward(ids.to(self._device), positions)

    def _continue(self) -> Tensor:
        if len(self._rows.in_use) < len(self._batch):
            keep = torch.from_numpy(np.flatnonzero(np.isin(self._batch, self._rows.in_use))).to(self._device)
            self._cache.batch_select_indices(keep)
            self._attended = self._attended[keep]
            self._batch = self._rows.in_use
        self._attended = torch.cat([self._attended, self._attended.new_ones(len(self._batch), 1)], 1)
        ids = torch.from_numpy(self._rows.last[self._batch])[:, None].to(self._device)
        positions = torch.from_numpy(self._rows.position[self._batch])[:, None].to(self._device)
        return self._forward(ids, positions)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        placed = {"position_ids": positions} if self._takes_positions else {}
        output = self._model(
            input_ids=ids,
            attention_mask=self._attended,
            past_key_values=self._cache,
            use_cache=True,
            **placed,
            **self._options,
        )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].float()
        return logits
