"""First come, first served: requests in the order they were added, samples in order of their index."""

from __future__ import annotations

from pagemill.core.sequence import Sequence


class FirstComeFirstServed:
    """Serve the oldest request first; the newest gives way first."""

    uses_priority = False

    def admission_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return (number of the request, index of the sample)."""
        return (sequence.group.number, sequence.sample_index)

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the same key: whoever came last gives way first."""
        return (sequence.group.number, sequence.sample_index)
