"""Draws sorted under a key, so that nothing ever walks through a whole replay buffer."""

from collections.abc import Iterator

from sortedcontainers import SortedList


class DrawIndex:
    """Pairs of a whole-number key and a draw, each pair once, sorted by key, then by draw.

    With n pairs, every method takes O(log n) comparisons, plus what its result is long; iterators only what is taken of
    them. Not thread-safe, and not to be changed while an iterator is in use.
    """

    def __init__(self) -> None:
        self._pairs: SortedList = SortedList()

    def add(self, key: int, draw: int) -> None:
        """Add a pair."""
        self._pairs.add((key, draw))

    def remove(self, key: int, draw: int) -> None:
        """Remove a pair.

        Raises:
            ValueError: it is not there.
        """
        self._pairs.remove((key, draw))

    def of(self, key: int) -> Iterator[int]:
        """Yield the draws of a key, in order."""
        # A tuple that is the beginning of another sorts before it.
        return (draw for _, draw in self._pairs.irange((key,), (key + 1,)))

    def below(self, key: int) -> Iterator[int]:
        """Yield the draws of all lower keys, lowest key first."""
        return (draw for _, draw in self._pairs.irange(None, (key,)))

    def has(self, key: int) -> bool:
        """Return whether a key has a draw."""
        return next(self.of(key), None) is not None

    def keys(self, low: int, high: int) -> Iterator[int]:
        """Yield the keys in [low, high] that have draws, each once, in order."""
        while low <= high:
            pair = next(self._pairs.irange((low,), (high + 1,)), None)
            if pair is None:
                return
            yield pair[0]
            low = pair[0] + 1
