"""A queue of sequences, kept in the order of a key. The scheduler has two: waiting and running.

A sorted list: adding and removing search in O(log n) and shift pointers, which is far cheaper for the
lengths that occur (thousands) than what it saves, a sort or a scan a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from pagemill.core.sequence import Sequence


class SequenceQueue:
    """Sequences in rising order of `key`; equal keys by `seq_id`."""

    def __init__(self, key: Callable[[Sequence], tuple[int, ...]]) -> None:
        self._items: list[Sequence] = []
        self._policy_key = key

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def add(self, sequence: Sequence) -> None:
        """Insert at the place that the key gives."""
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is in the queue."""
        index = bisect_left(self._items, self._key(sequence), key=self._key)
        assert self._items[index] is sequence, f"sequence {sequence.seq_id} is not in the queue"
        del self._items[index]

    def _key(self, sequence: Sequence) -> tuple[tuple[int, ...], int]:
        return (self._policy_key(sequence), sequence.seq_id)
