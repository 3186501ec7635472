"""Longest cached prefix first: what is in the cache, on the device or in the host tier, is used before it is evicted, and nobody waits for ever.

Of the waiting, the one with the most leading blocks in the prefix cache is admitted first; equal ones in order
of arrival. So requests with one system prompt, or turns of one conversation, run one after the other.
Bounded waiting: a sequence past which `MOST_PASSED` others have left the queue is overdue, and while there are
overdue ones every second admission is theirs, the oldest first.

The number of blocks is looked up when a sequence comes, and kept up by events. A sequence waits for the name
of the block after its prefix: when that block is computed, the sequence is looked up again, some sequences a
step (`_PER_STEP`), so that a thousand that wait for one prompt do not cost one step. What was evicted in
the meantime is seen when a sequence comes to the front. So a step costs a logarithm of the queue for each
sequence that it admits or looks up.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from pagemill.core.policies.base import (
    MOST_PASSED,
    Key,
    Policy,
    PolicySetting,
    PrefixIndex,
    WaitingQueue,
)
from pagemill.core.policies.fcfs import arrival_key
from pagemill.core.sequence import Sequence
from pagemill.core.sequence_queue import SequenceQueue

_PER_STEP = 64


class PrefixQueue:
    """The waiting by the length of their cached prefixes."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._depths: dict[
            int, int
        ] = {}  # seq_id -> leading blocks found when it was looked up last
        self._order = SequenceQueue(self._key)
        # Name of a block -> those that would begin with it if it were there.
        self._awaiting: dict[bytes, dict[int, Sequence]] = {}
        self._awaited: dict[int, bytes] = {}  # seq_id -> that name
        self._to_look_up: deque[Iterator[Sequence]] = deque()
        self._tickets: OrderedDict[int, tuple[int, Sequence]] = OrderedDict()
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, sequence: Sequence) -> None:
        """Look a sequence up and queue it."""
        self._tickets[sequence.seq_id] = (self._num_left, sequence)
        self._enter(sequence, self._depth(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is queued."""
        del self._tickets[sequence.seq_id]
        self._num_left += 1
        self._leave(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the longest prefix first, and an overdue one in every second place.

        Also where each step admits one: whose turn it is goes by how many have left.
        """
        self._look_up()
        overdue, longest = self._overdue(), self._longest()
        yielded: set[int] = set()
        turn = longest if self._num_left % 2 else overdue
        while len(yielded) < len(self):
            sequence = next((s for s in turn if s.seq_id not in yielded), None)
            turn = longest if turn is overdue else overdue
            if sequence is not None:
                yielded.add(sequence.seq_id)
                yield sequence

    def note_sealed(self, names: list[bytes]) -> None:
        """Take the names of blocks that can be found from now on."""
        for name in names:
            waiting = self._awaiting.pop(name, None)
            if waiting:
                self._to_look_up.append(iter(waiting.values()))

    def _overdue(self) -> Iterator[Sequence]:
        for ticket, sequence in self._tickets.values():
            if self._num_left - ticket < MOST_PASSED:
                return
            yield sequence

    def _longest(self) -> Iterator[Sequence]:
        """Yield all by what can be found now: some have lost blocks since they were looked up."""
        lost: list[tuple[Key, Sequence]] = []
        fresh: list[Sequence] = []
        for sequence in self._order:
            key = self._order.key_of(sequence)
            while lost and lost[0][0] < key:
                yield heapq.heappop(lost)[1]
            depth = key_depth = self._depths[sequence.seq_id]
            if len(fresh) < _PER_STEP:
                depth = self._depth(sequence)
            if depth < key_depth:
                fresh.append(sequence)
                if len(fresh) == 1:
                    self._to_look_up.append(iter(fresh))
                heapq.heappush(lost, ((-depth, *key[1:]), sequence))
            else:
                yield sequence
        while lost:
            yield heapq.heappop(lost)[1]

    def _look_up(self) -> None:
        """Move some of those whose prefix may have changed to their places."""
        for _ in range(_PER_STEP):
            sequence = None
            while self._to_look_up and sequence is None:
                sequence = next(self._to_look_up[0], None)
                if sequence is None:
                    self._to_look_up.popleft()
            if sequence is None:
                return
            if sequence.seq_id in self._tickets:
                self._leave(sequence)
                self._enter(sequence, self._depth(sequence))

    def _enter(self, sequence: Sequence, depth: int) -> None:
        self._depths[sequence.seq_id] = depth
        self._order.add(sequence)
        if depth < len(sequence.block_names):
            name = self._awaited[sequence.seq_id] = sequence.block_names[depth]
            self._awaiting.setdefault(name, {})[sequence.seq_id] = sequence

    def _leave(self, sequence: Sequence) -> None:
        self._order.remove(sequence)
        del self._depths[sequence.seq_id]
        # Not by its names: a reset takes those of one that was swapped.
        name = self._awaited.pop(sequence.seq_id, None)
        waiting = None if name is None else self._awaiting.get(name)
        if name is not None and waiting is not None:
            waiting.pop(sequence.seq_id, None)
            if not waiting:
                del self._awaiting[name]

    def _depth(self, sequence: Sequence) -> int:
        """Return how many leading blocks need no computing: found in a tier, swapped, or held."""
        size = self._prefixes.block_size
        swapped = self._prefixes.swapped(sequence.seq_id)
        if swapped is not None:
            return swapped.num_tokens // size
        if sequence.num_computed >= size:
            return sequence.num_computed // size
        names = sequence.block_names
        depth = min(self._depths.get(sequence.seq_id, 0), len(names))
        while depth and not self._is_found(names[depth - 1]):
            depth -= 1
        while depth < len(names) and self._is_found(names[depth]):
            depth += 1
        return depth

    def _is_found(self, name: bytes) -> bool:
        find, find_slot = self._prefixes.find, self._prefixes.find_slot
        return find(name) is not None or find_slot(name) is not None

    def _key(self, sequence: Sequence) -> Key:
        return (-self._depths[sequence.seq_id], *arrival_key(sequence))


class LongestPrefixFirst(Policy):
    """Serve what is cached first; the newest gives way first."""

    uses_priority = False

    def __init__(self, setting: PolicySetting) -> None:
        self._block_size = setting.prefixes.block_size
        self._queue = PrefixQueue(setting.prefixes)

    def make_queue(self) -> WaitingQueue:
        """Return the queue, which hears what is computed."""
        return self._queue

    def running_key(self, sequence: Sequence) -> Key:
        """Return the order of arrival."""
        return arrival_key(sequence)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return the order of arrival: whoever came last gives way first."""
        return arrival_key(sequence)

    def note_computed(self, sequence: Sequence, start: int, end: int, num_new: int) -> None:
        """Tell the queue which blocks can be found now."""
        first, stop = start // self._block_size, end // self._block_size
        if stop > first and sequence.block_names:
            self._queue.note_sealed(sequence.block_names[first:stop])
