"""Keeps the fast decoder's slots full: waiting requests move in as finished ones move out."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from lightning_ppo.rollout.local.decoder import NativeDecoder
from lightning_ppo.rollout.local.protocol import Finished, Submit
from lightning_ppo.rollout.local.rows import RowTable
from lightning_ppo.rollout.local.waiting import WaitingRequests

_KEPT_PROMPTS = 8


class SlotScheduler(WaitingRequests):
    """Waiting requests, slots, and one decode step at a time."""

    def __init__(self, decoder: NativeDecoder, rows: RowTable) -> None:
        super().__init__(rows)
        self._decoder = decoder
        # Prefilled prompts, so that the responses of one group share one prefill although they rarely start together.
        self._prompts: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights; responses in slots go on with the keys and values they have."""
        self._decoder.load(weights)
        self._prompts.clear()

    def step(self, version: int) -> Finished | None:
        """Fill free slots, sample one token in every slot, and return the responses that ended, or None.

        Raises:
            FloatingPointError: the weights give logits that are not finite.
        """
        self._admit()
        if len(self._rows.in_use) == 0:
            return None
        logits = self._decoder.step(self._rows.last, self._rows.position)
        return self._rows.advance(logits, self._rows.all_rows, version)

    def _admit(self) -> None:
        slots_of: dict[tuple[int, ...], list[int]] = {}
        while self._waiting and self._rows.has_free:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            slot = self._rows.place(Submit(key, request))
            if len(request.prompt_ids) > 1:
                slots_of.setdefault(request.prompt_ids, []).append(slot)
        for prompt in slots_of.keys() & self._prompts.keys():
            self._enter(slots_of.pop(prompt), self._prompts[prompt])
        # The rest of a group that starts in pieces comes next, so the prompts that were asked for last are kept.
        recent = list(slots_of)[-_KEPT_PROMPTS:]
        for pack in self._decoder.packer.pack(slots_of):
            for prompt, prefilled in zip(pack.prompts, self._decoder.prefill(pack), strict=True):
                self._enter(slots_of[prompt], prefilled)
                if prompt in recent:
                    self._prompts[prompt] = prefilled
        while len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)

    def _enter(self, slots: list[int], prefilled: Tensor) -> None:
        for slot in slots:
            self._decoder.admit(slot, prefilled)
