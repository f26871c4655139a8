"""The trainer's host copy of the policy's weights: what every server is sent, also one that comes up again later."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.buckets import Bucket, piece_bytes, split
from lightning_ppo.refit.layout import FlatLayout
from lightning_ppo.refit.shared_memory import SharedWeights


class HostWeights:
    """All weights in one flat buffer of shared memory, in the precision of the servers.

    Attributes:
        buckets: How they travel.
        version: The policy version they are; None while they are incomplete.
    """

    def __init__(self, layout: FlatLayout, bucket_bytes: int) -> None:
        """Reserve the memory.

        Raises:
            EngineError: no place for it.
        """
        self._shared = SharedWeights.reserve(layout)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if layout.num_bytes:
            self._bytes = torch.frombuffer(self._shared.buffer, dtype=torch.uint8, count=layout.num_bytes)
        self.buckets = split(layout, bucket_bytes)
        self.version: int | None = None

    @classmethod
    def of(cls, weights: list[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> "HostWeights":
        """Reserve memory for these tensors; nothing is copied yet.

        Args:
            weights: Names and tensors of a whole state dict.
            dtype: Precision of the servers; floating-point tensors are sent in it.
            bucket_bytes: Largest number of bytes in a bucket; see `piece_bytes`.

        Raises:
            EngineError: a name comes twice, or there is no place.
        """
        layout = FlatLayout.of(weights, dtype)
        return cls(layout, piece_bytes(layout.num_bytes, bucket_bytes))

    @property
    def fd(self) -> int:
        """File descriptor of the buffer."""
        return self._shared.fd

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._shared.layout.num_bytes

    def fill(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[Bucket]:
        """Copy tensors in, and yield each bucket when it is complete and one more tensor, or the end, was found good.

        Until the last bucket was yielded and asked for the next, `version` is None: half an update is no policy.

        Args:
            weights: Exactly the names and shapes of the layout. In the same order, a bucket is sent while the next one
                is being copied; in any other order it is just slower. Any floating dtype, device and stride.
            version: The policy version they are.

        Raises:
            EngineError: a tensor is missing, unknown, doubled, or of another shape or kind.
        """
        self.version = None
        home = {slot.name: bucket for bucket in self.buckets for slot in bucket.slots}
        waits = {bucket.index: len(bucket.slots) for bucket in self.buckets}
        missing = dict.fromkeys(home)
        complete: Bucket | None = None
        for name, tensor in weights:
            self._write(name, tensor, missing)
            if complete is not None:
                yield complete
            bucket = home[name]
            waits[bucket.index] -= 1
            complete = bucket if waits[bucket.index] == 0 else None
        if missing:
            raise EngineError(f"weights={next(iter(missing))} is missing; send the same tensors in every update")
        if complete is not None:
            yield complete
        self.version = version

    def tensors(self, bucket: Bucket) -> dict[str, Tensor]:
        """Views of the bucket's tensors."""
        return {slot.name: self._shared.views[slot.name] for slot in bucket.slots}

    def flat(self, bucket: Bucket) -> Tensor:
        """View of the bucket's bytes, `[num_bytes]` uint8."""
        return self._bytes[bucket.begin : bucket.end]

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        self.version = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._shared.close()

    def _write(self, name: str, tensor: Tensor, missing: dict[str, None]) -> None:
        if name not in missing:
            why = "comes twice" if name in self._shared.views else "was not among the first weights"
            raise EngineError(f"weights={name} {why}; send the same tensors in every update")
        view = self._shared.views[name]
        same_kind = view.dtype == tensor.dtype or (view.is_floating_point() and tensor.is_floating_point())
        if view.shape != tensor.shape or not same_kind:
            raise EngineError(
                f"weights={name} is {tensor.dtype}{list(tensor.shape)} but was {view.dtype}{list(view.shape)};"
                " send the same shapes and dtypes in every update"
            )
        view.copy_(tensor.detach())
        missing.pop(name)
