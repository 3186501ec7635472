"""Who gives way when blocks run short. Pure: candidates are chosen, nothing is changed.

A victim loses its blocks. What it computed goes to the host tier, or is computed again when it is admitted
again, whichever is cheaper (`host_tier`). Called by the planner.

In this order, each time the last by the policy's `victim_key` first:

1. waiting sequences whose release frees a block at once. They are forks that found no seat: nothing
   but their own prompt is lost, and they are not running.
2. running sequences.
3. waiting sequences that share their blocks, which only frees blocks when all sharers let go.

A sequence takes only from those behind it, with one exception: the first of the running ones (or, when
none runs, the first to be admitted) takes from everybody and goes on to 3. The pool holds one sequence of
full length, so it always gets its blocks, and every step makes progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pagemill.core.policies.base import Key, VictimOrder
from pagemill.core.sequence import Sequence


class Holdings(Protocol):
    """What choosing needs to know of the blocks."""

    def frees_any(self, sequence: Sequence) -> bool:
        """Return whether releasing the sequence frees at least one block."""
        ...


class VictimQueue:
    """The candidates of one plan. Made when blocks first run short, since sorting costs."""

    def __init__(
        self, running: Iterable[Sequence], holders: Iterable[Sequence], policy: VictimOrder
    ) -> None:
        self._key = policy.victim_key
        self._running = sorted(running, key=self._key)
        self._holders = sorted(holders, key=self._key)

    def next_for(self, needy: Sequence, holdings: Holdings) -> Sequence | None:
        """Take out and return who gives way to `needy`; None: it has to wait itself."""
        is_first = not self._running or self._running[0] is needy
        after = None if is_first else self._key(needy)
        victim = self._last(self._holders, needy, after, holdings)
        if victim is None:
            victim = self._last(self._running, needy, after, None)
        if victim is None and is_first:
            victim = self._last(self._holders, needy, None, None)
        return victim

    def _last(
        self,
        candidates: list[Sequence],
        needy: Sequence,
        after: Key | None,
        holdings: Holdings | None,
    ) -> Sequence | None:
        for index in range(len(candidates) - 1, -1, -1):
            candidate = candidates[index]
            if after is not None and self._key(candidate) <= after:
                return None
            if candidate is needy or (holdings and not holdings.frees_any(candidate)):
                continue
            return candidates.pop(index)
        return None
