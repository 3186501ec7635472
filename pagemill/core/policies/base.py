"""What a scheduling policy decides: who is admitted first, and who gives way first.

Both answers are sort keys. A key is a constant of the sequence: it must not change while the sequence
is queued, because queues are kept sorted by it. Called by the scheduler's queues and by the planner.
"""

from __future__ import annotations

from typing import Protocol

from pagemill.core.sequence import Sequence


class Policy(Protocol):
    """Order of service."""

    uses_priority: bool  # a request's priority means something; else one that is not 0 is refused

    def admission_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the sort key of admission: the smallest is served first."""
        ...

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the sort key of preemption: the largest gives way first.

        Keys are distinct. A sequence only takes blocks from those with larger keys than its own; the
        one with the smallest key is never preempted for another, which is what guarantees progress.
        """
        ...
