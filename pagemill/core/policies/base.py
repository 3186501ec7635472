"""What a scheduling policy decides: who is admitted first, and who gives way first.

A policy makes the queue of the waiting, which is in the order of admission, and gives the key by which
running sequences give way. It is told what happens: arrivals, tokens computed, ends. Called by the roster,
by the commit of a step, and by the planner, which reads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.core.host_tier import SwappedTable
from pagemill.core.sequence import Sequence, SequenceGroup

# Keys of one kind are compared with each other only, the smallest first.
Key = tuple[float, ...]
# Bounded waiting: once so many others have left the queue before one, every second admission is its own.
MOST_PASSED = 256


def checked_key(key: Key) -> Key:
    """Return a key that can be sorted by; TypeError for any other, which would mix up the order of all."""
    if isinstance(key, tuple) and all(isinstance(x, (int, float)) and x == x for x in key):
        return key
    raise TypeError(f"a policy gave the key {key!r}; a key is a tuple of numbers, none of them NaN")


class PrefixIndex(Protocol):
    """What a policy may ask of the prefix cache."""

    block_size: int

    def find(self, name: bytes) -> int | None:
        """Return the block with these contents, or None."""
        ...

    def find_slot(self, name: bytes) -> int | None:
        """Return the slot of the host tier with these contents, or None."""
        ...

    def swapped(self, seq_id: int) -> SwappedTable | None:
        """Return what a swapped sequence has in the host tier, or None."""
        ...


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """What a policy is made from."""

    prefixes: PrefixIndex
    tenant_weights: dict[str, float] = field(default_factory=dict)  # 1.0 for those not listed


class WaitingQueue(Protocol):
    """The waiting sequences, in the order of admission."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Yield them in order. What the order depends on does not change in the meantime."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Take one in."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take one out that is queued."""
        ...


class VictimOrder(Protocol):
    """Who gives way first."""

    def victim_key(self, sequence: Sequence) -> Key:
        """Return the sort key of preemption: the largest gives way first.

        Keys are distinct, and do not change while a plan is made. A sequence only takes blocks from
        those with larger keys than its own; the one with the smallest key is never preempted for
        another, which is what guarantees progress.
        """
        ...


class Policy(VictimOrder, Protocol):
    """Order of service."""

    uses_priority: bool  # a request's priority means something; else one that is not 0 is refused

    def __init__(self, setting: PolicySetting) -> None: ...

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue of the waiting."""
        ...

    def running_key(self, sequence: Sequence) -> Key:
        """Return the key of service among the running: a constant of the sequence."""
        ...

    def note_arrival(self, group: SequenceGroup) -> None:
        """A request is about to be queued."""

    def note_computed(self, sequence: Sequence, start: int, end: int, num_new: int) -> None:
        """Positions [start, end) are being computed, `num_new` of them for the first time."""

    def note_end(self, group: SequenceGroup) -> None:
        """The last sample of a request has ended."""
