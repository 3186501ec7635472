"""A queue of sequences, kept in the order of a key.

A sorted list cut into buckets: searching is O(log n), and adding or removing shifts the pointers of one
bucket, so that a hundred thousand waiting cost about what a hundred do. The key is taken when a sequence is
added and remembered: it may change while the sequence is queued, which moves nothing.

Made by the roster, and by policies as a part of queues of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from pagemill.core.policies.base import Key, checked_key
from pagemill.core.sequence import Sequence

_BUCKET = 512  # a bucket of twice as many is cut in two


class SequenceQueue:
    """Sequences in rising order of `key`; equal keys by `seq_id`."""

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._policy_key = key
        self._keys: dict[int, tuple[Key, int]] = {}  # seq_id -> what it is sorted by
        # Three lists in step with each other; no bucket is empty.
        self._last: list[tuple[Key, int]] = []  # the largest key of each bucket
        self._bucket_keys: list[list[tuple[Key, int]]] = []
        self._buckets: list[list[Sequence]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._keys

    def __iter__(self) -> Iterator[Sequence]:
        for bucket in self._buckets:
            yield from bucket

    def add(self, sequence: Sequence) -> None:
        """Insert at the place that the key gives now. What the key raises leaves the queue as it was."""
        seq_id = sequence.seq_id
        assert seq_id not in self._keys, f"sequence {seq_id} is in the queue already"
        key = (checked_key(self._policy_key(sequence)), seq_id)
        self._keys[seq_id] = key
        if not self._buckets:
            self._last.append(key)
            self._bucket_keys.append([key])
            self._buckets.append([sequence])
            return
        at = min(bisect_left(self._last, key), len(self._last) - 1)
        keys = self._bucket_keys[at]
        index = bisect_left(keys, key)
        keys.insert(index, key)
        self._buckets[at].insert(index, sequence)
        self._last[at] = keys[-1]
        if len(keys) >= 2 * _BUCKET:
            self._cut(at)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is in the queue."""
        key = self._keys.pop(sequence.seq_id, None)
        assert key is not None, f"sequence {sequence.seq_id} is not in the queue"
        at = bisect_left(self._last, key)
        keys = self._bucket_keys[at]
        index = bisect_left(keys, key)
        del keys[index], self._buckets[at][index]
        if keys:
            self._last[at] = keys[-1]
        else:
            del self._last[at], self._bucket_keys[at], self._buckets[at]

    def key_of(self, sequence: Sequence) -> Key:
        """Return what a queued sequence is sorted by."""
        return self._keys[sequence.seq_id][0]

    def _cut(self, at: int) -> None:
        keys, bucket = self._bucket_keys[at], self._buckets[at]
        self._bucket_keys[at : at + 1] = [keys[:_BUCKET], keys[_BUCKET:]]
        self._buckets[at : at + 1] = [bucket[:_BUCKET], bucket[_BUCKET:]]
        self._last.insert(at, keys[_BUCKET - 1])
