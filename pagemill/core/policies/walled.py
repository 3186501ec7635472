"""A wall around a policy: one that fails on a request ends that request, not the engine.

What a policy raises while a request arrives goes through: nothing is queued yet, and the scheduler answers. From
then on others may have been planned beside the request and on its blocks, so it runs to the end of the step, under
a key behind all others, and ends when the results are taken in. Made by the scheduler around whatever policy
was chosen.

The same holds for its queue of the waiting, where a sequence comes back after a preemption. A queue that fails while
it is gone through fails on nobody in particular: it is given up, and the waiting are served in order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pagemill.core.policies.base import Key, Policy, WaitingQueue, checked_key
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.core.sequence_queue import SequenceQueue
from pagemill.log import get_logger

logger = get_logger(__name__)


class WalledPolicy:
    """A `Policy` whose failures are kept until `take_broken`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._broken: dict[int, tuple[SequenceGroup, Exception]] = {}  # by number of the group

    def make_queue(self) -> WalledQueue:
        """Return the policy's queue, walled too."""
        return WalledQueue(self._policy.make_queue(), self._break)

    def running_key(self, sequence: Sequence) -> Key:
        """Return the policy's key."""
        return self._key(self._policy.running_key, sequence)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return the policy's key."""
        return self._key(self._policy.victim_key, sequence)

    def note_arrival(self, group: SequenceGroup) -> None:
        """Tell the policy; it may raise."""
        self._policy.note_arrival(group)

    def note_computed(self, sequence: Sequence, start: int, end: int, num_new: int) -> None:
        """Tell the policy."""
        try:
            self._policy.note_computed(sequence, start, end, num_new)
        except Exception as error:
            self._break(sequence.group, error)

    def note_end(self, group: SequenceGroup) -> None:
        """Tell the policy; the request has its answer, so nobody is told of a failure but the log."""
        try:
            self._policy.note_end(group)
        except Exception:
            logger.exception("the policy failed on the end of request %s", group.request_id)

    def take_broken(self) -> list[tuple[SequenceGroup, Exception]]:
        """Return the unfinished requests that have to end, once, and why."""
        broken, self._broken = self._broken, {}
        return [(group, error) for group, error in broken.values() if group.sequences]

    def _key(self, make: Callable[[Sequence], Key], sequence: Sequence) -> Key:
        try:
            return checked_key(make(sequence))
        except Exception as error:
            self._break(sequence.group, error)
            return (math.inf, sequence.seq_id)

    def _break(self, group: SequenceGroup, error: Exception) -> None:
        if group.number not in self._broken:
            logger.exception("the policy failed on request %s, which will end", group.request_id)
            self._broken[group.number] = (group, error)


class WalledQueue:
    """A `WaitingQueue` that knows by itself who is in it, whatever the policy's queue does.

    `fail` is told of the request that the policy's queue has failed on.
    """

    def __init__(
        self, queue: WaitingQueue, fail: Callable[[SequenceGroup, Exception], None]
    ) -> None:
        self.smallest = SequenceQueue(_size)  # the members, those with the fewest tokens first
        self._queue = queue
        self._fail = fail
        self._members: dict[int, Sequence] = {}
        self._strays: set[int] = set()  # members that the policy's queue did not take

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield each member once, in the policy's order; those that it leaves out come last."""
        seen: set[int] = set()
        try:
            for sequence in self._queue:
                seq_id = sequence.seq_id
                if seq_id in self._members and seq_id not in seen:
                    seen.add(seq_id)
                    yield sequence
        except Exception:
            self._give_up()
        if len(seen) < len(self._members):
            left = [s for seq_id, s in self._members.items() if seq_id not in seen]
            yield from sorted(left, key=_arrival)

    def add(self, sequence: Sequence) -> None:
        """Take one in. It raises for a request that arrives; one that is here already ends with the step."""
        try:
            self._queue.add(sequence)
        except Exception as error:
            if not sequence.group.sequences:
                raise
            self._fail(sequence.group, error)
            self._strays.add(sequence.seq_id)
        self._members[sequence.seq_id] = sequence
        self.smallest.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take one out that is queued."""
        del self._members[sequence.seq_id]
        self.smallest.remove(sequence)
        if sequence.seq_id in self._strays:
            self._strays.remove(sequence.seq_id)
            return
        try:
            self._queue.remove(sequence)
        except Exception as error:
            self._fail(sequence.group, error)

    def _give_up(self) -> None:
        """Go on without the policy's queue, which has raised."""
        logger.exception(
            "the policy's queue failed; from here on the waiting are served in order of arrival"
        )
        self._queue = SequenceQueue(_arrival)
        for sequence in self._members.values():
            self._queue.add(sequence)
        self._strays.clear()


def _arrival(sequence: Sequence) -> Key:
    return (sequence.group.number, sequence.seq_id)


def _size(sequence: Sequence) -> Key:
    return (sequence.num_remaining, sequence.group.number)
