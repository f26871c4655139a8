"""Keeps the fast decoder's slots full: waiting requests move in as finished ones move out."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from lightning_ppo.rollout.engine import GenerationRequest
from lightning_ppo.rollout.local.decoder import NativeDecoder
from lightning_ppo.rollout.local.protocol import Finished, Submit
from lightning_ppo.rollout.local.rows import RowTable

_KEPT_PROMPTS = 8


class SlotScheduler:
    """Waiting requests, slots, and one decode step at a time."""

    def __init__(self, decoder: NativeDecoder, rows: RowTable) -> None:
        self._decoder = decoder
        self._rows = rows
        self._waiting: dict[int, GenerationRequest] = {}
        # Prefilled prompts, so that the responses of one group share one prefill although they rarely start together.
        self._prompts: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._waiting) or len(self._rows.in_use) > 0

    def submit(self, submit: Submit) -> None:
        """Queue a request."""
        self._waiting[submit.key] = submit.request

    def abort(self, key: int) -> None:
        """Forget a request, wherever it is; unknown keys are ignored."""
        if self._waiting.pop(key, None) is None:
            self._rows.abort(key)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights; responses in slots go on with the keys and values they have."""
        self._decoder.load(weights)
        self._prompts.clear()

    def step(self, version: int) -> Finished | None:
        """Fill free slots, sample one token in every slot, and return the responses that ended, or None.

        Raises:
            FloatingPointError: the weights give logits that are not finite.
        """
        while self._waiting and self._rows.has_free:
            key = next(iter(self._waiting))
            self._admit(Submit(key, self._waiting.pop(key)))
        if len(self._rows.in_use) == 0:
            return None
        logits = self._decoder.step(self._rows.last, self._rows.position)
        return self._rows.advance(logits, self._rows.all_rows, version)

    def _admit(self, submit: Submit) -> None:
        slot = self._rows.place(submit)
        prompt = submit.request.prompt_ids
        if len(prompt) == 1:
            return
        prefilled = self._prompts.get(prompt)
        if prefilled is None:
            prefilled = self._prompts[prompt] = self._decoder.prefill(prompt)
            if len(self._prompts) > _KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        self._decoder.admit(slot, prefilled)
