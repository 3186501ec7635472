"""Priority with ageing: lower numbers first, and nobody waits for ever.

A step of priority is worth `STEP_S` seconds of waiting: a request is served as if it had come
priority * STEP_S seconds later than it did. So a lower number passes what is not much older, equal ones are
served in order of arrival, and whoever has waited long enough is first whatever comes after.
"""

from __future__ import annotations

from pagemill.core.sequence import Sequence

STEP_S = 30.0


class Priority:
    """Serve the most urgent request first; the least urgent gives way first."""

    uses_priority = True

    def admission_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return (when its turn is, in milliseconds; number of the request; index of the sample)."""
        group = sequence.group
        turn_s = group.arrival_time + group.request.priority * STEP_S
        return (round(1000 * turn_s), group.number, sequence.sample_index)

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the same key: whose turn is last gives way first."""
        return self.admission_key(sequence)
