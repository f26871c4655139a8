"""Requests that wait for a row: what both backends share."""

from lightning_ppo.rollout.engine import GenerationRequest
from lightning_ppo.rollout.local.protocol import Submit
from lightning_ppo.rollout.local.rows import RowTable


class WaitingRequests:
    """Requests in order of arrival, in front of the rows that are being sampled."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._waiting: dict[int, GenerationRequest] = {}

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
