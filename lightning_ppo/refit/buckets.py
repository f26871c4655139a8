"""Pieces in which weights travel: neighbours in a flat layout, about as many bytes as asked for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.layout import FlatLayout, TensorSlot

_PIECES = 2
"""Into so many the weights are cut, so that the second is copied beside the load of the first."""
_SMALLEST_PIECE = 32 * 1024 * 1024
"""Bytes; in less than this a server's answer costs more than the overlap saves."""
_FIRST_PIECE = 1024 * 1024
"""Bytes; servers are held when it is complete, which takes them longer than the copy of a few more pieces."""


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that lie next to each other in the trainer's buffer and travel together."""

    index: int
    """Number of the bucket within its update, from 0."""
    slots: tuple[TensorSlot, ...]
    begin: int
    """Offset of its first byte in the buffer."""
    end: int
    """Offset behind its last byte."""

    @property
    def num_bytes(self) -> int:
        """Bytes that travel; 0 if all its tensors are empty."""
        return self.end - self.begin

    def to_message(self) -> dict[str, Any]:
        """Describe the tensors in plain values, for JSON."""
        return {
            "begin": self.begin,
            "end": self.end,
            "slots": [[slot.name, slot.dtype, list(slot.shape), slot.offset] for slot in self.slots],
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Rebuild what `to_message` described.

        Raises:
            EngineError: it is no such description.
        """
        try:
            slots = tuple(
                TensorSlot(str(name), str(dtype), tuple(int(size) for size in shape), int(offset))
                for name, dtype, shape, offset in message["slots"]
            )
            bucket = cls(0, slots, int(message["begin"]), int(message["end"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"bucket={error!r} is no list of tensors; both sides need the same version") from None
        for slot in slots:
            if not bucket.begin <= slot.offset <= slot.offset + slot.num_bytes <= bucket.end:
                raise EngineError(f"weights={slot.name} lies outside its bucket; both sides need the same version")
        return bucket

    def layout(self) -> FlatLayout:
        """Where the tensors lie relative to the bucket's first byte."""
        moved = tuple(TensorSlot(s.name, s.dtype, s.shape, s.offset - self.begin) for s in self.slots)
        return FlatLayout(moved, self.num_bytes)


def piece_bytes(num_bytes: int, largest: int) -> int:
    """Choose how large buckets are.

    Args:
        num_bytes: Of all weights.
        largest: Bytes of a bucket that are not exceeded.
    """
    return min(largest, max(_SMALLEST_PIECE, -(-num_bytes // _PIECES)))


def split(layout: FlatLayout, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a layout into a small first bucket and others of at most `bucket_bytes`.

    A larger tensor is a bucket of its own.
    """
    groups: list[list[TensorSlot]] = []
    begin, limit = 0, bucket_bytes
    for slot in sorted(layout.slots, key=lambda slot: slot.offset):
        if not groups or slot.offset + slot.num_bytes - begin > limit:
            limit = bucket_bytes if groups else min(bucket_bytes, _FIRST_PIECE)
            groups.append([])
            begin = slot.offset
        groups[-1].append(slot)
    return tuple(_bucket(index, slots) for index, slots in enumerate(groups))


def join(buckets: Iterable[Bucket], bucket_bytes: int) -> list[Bucket]:
    """Make neighbours one bucket, of at most `bucket_bytes`: what is complete together travels together."""
    joined: list[Bucket] = []
    for bucket in buckets:
        last = joined[-1] if joined else None
        if last is None or bucket.index != last.index + 1 or bucket.end - last.begin > bucket_bytes:
            joined.append(bucket)
        else:
            joined[-1] = Bucket(bucket.index, last.slots + bucket.slots, last.begin, bucket.end)
    return joined


def _bucket(index: int, slots: Iterable[TensorSlot]) -> Bucket:
    members = tuple(slots)
    last = members[-1]
    return Bucket(index, members, members[0].offset, last.offset + last.num_bytes)
