"""A wall around a policy: one that fails on a request ends that request, not the engine.

What a policy raises while a request arrives goes through: nothing is queued yet, and the scheduler answers. From
then on others may have been planned beside the request and on its blocks, so it runs to the end of the step, under
a key behind all others, and ends when the results are taken in. Made by the scheduler around whatever policy
was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pagemill.core.policies.base import Key, Policy, WaitingQueue
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.log import get_logger

logger = get_logger(__name__)


class WalledPolicy:
    """A `Policy` whose failures are kept until `take_broken`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._broken: dict[int, tuple[SequenceGroup, Exception]] = {}  # by number of the group

    def make_queue(self) -> WaitingQueue:
        """Return the policy's queue."""
        return self._policy.make_queue()

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
            return make(sequence)
        except Exception as error:
            self._break(sequence.group, error)
            return (math.inf, sequence.seq_id)

    def _break(self, group: SequenceGroup, error: Exception) -> None:
        if group.number not in self._broken:
            logger.exception("the policy failed on request %s, which will end", group.request_id)
            self._broken[group.number] = (group, error)
