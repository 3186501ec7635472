"""First come, first served: requests in the order they were added, samples in order of their index."""

from __future__ import annotations

from pagemill.core.policies.base import Key, Policy, PolicySetting, WaitingQueue
from pagemill.core.sequence import Sequence
from pagemill.core.sequence_queue import SequenceQueue


def arrival_key(sequence: Sequence) -> Key:
    """Return (number of the request, index of the sample)."""
    return (sequence.group.number, sequence.sample_index)


class FirstComeFirstServed(Policy):
    """Serve the oldest request first; the newest gives way first."""

    uses_priority = False

    def __init__(self, setting: PolicySetting) -> None:
        """Take nothing of the setting."""

    def make_queue(self) -> WaitingQueue:
        """Return a queue in order of arrival."""
        return SequenceQueue(arrival_key)

    def running_key(self, sequence: Sequence) -> Key:
        """Return the order of arrival."""
        return arrival_key(sequence)

    def victim_key(self, sequence: Sequence) -> Key:
        """Return the same key: whoever came last gives way first."""
        return arrival_key(sequence)
