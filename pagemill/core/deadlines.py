"""Which requests have run out of time.

A request may have to be begun by one moment, and to be finished by another (`RequestDeadlines`). A heap by
moment: a request costs a logarithm, a step looks at one entry. Entries of ended requests are passed over, and
swept out each time the heap has doubled. Owned by the scheduler, which asks before each step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from pagemill.core.sequence import SequenceGroup

_SHORTEST_S = 1e-6  # of a timeout that is told to the digit
_FEW = 1024  # entries that are not worth sweeping


@dataclass(frozen=True, slots=True)
class Expiry:
    """A request that ran out of time."""

    group: SequenceGroup
    deadline: str  # "start" | "end"
    message: str


class Deadlines:
    """The deadlines of all unfinished requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, SequenceGroup]] = []
        self._sweep_at = _FEW

    def add(self, group: SequenceGroup) -> None:
        """Watch a request, if it has deadlines."""
        deadlines = group.request.deadlines
        if deadlines is None:
            return
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[3].num_unfinished]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FEW, 2 * len(self._heap))
        for moment, kind in ((deadlines.start_by, "start"), (deadlines.end_by, "end")):
            if moment is not None:
                heapq.heappush(self._heap, (moment, group.number, kind, group))

    def take_expired(self, now: float) -> list[Expiry]:
        """Return the requests whose time is over at `now`, each once."""
        expired: dict[int, Expiry] = {}
        while self._heap and self._heap[0][0] <= now:
            _, number, kind, group = heapq.heappop(self._heap)
            is_late = group.num_unfinished and (kind == "end" or not group.is_begun)
            if is_late and number not in expired:
                expired[number] = Expiry(group, kind, _message(group, kind, now))
        return list(expired.values())


def _shown_s(limit: float) -> str:
    """Return a timeout in words: one that is lost in the difference of two moments is not 0."""
    return f"{limit:.3g} s" if limit >= _SHORTEST_S else f"less than {_SHORTEST_S:g} s"


def _message(group: SequenceGroup, kind: str, now: float) -> str:
    deadlines = group.request.deadlines
    assert deadlines is not None
    waited = now - deadlines.since
    if kind == "start":
        assert deadlines.start_by is not None
        limit = deadlines.start_by - deadlines.since
        return (
            f"the request waited {waited:.3g} s and was not begun; its start_timeout is {_shown_s(limit)}. "
            "Raise start_timeout, or send less at once"
        )
    assert deadlines.end_by is not None
    limit = deadlines.end_by - deadlines.since
    num_tokens = sum(len(s.output_token_ids) for s in group.sequences.values())
    return (
        f"the request was not finished after {waited:.3g} s ({num_tokens} tokens were generated); its "
        f"request_timeout is {_shown_s(limit)}. Raise request_timeout, or lower max_tokens"
    )
