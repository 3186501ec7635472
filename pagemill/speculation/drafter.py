"""The drafts of one step: asked of the proposer, written behind the known tokens of their rows.

Owned by `worker.model_runner`, which lets it see each step at three points: before rows are dropped, when
the new ones are there, and before the batch is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagemill.batch.request_table import RequestTable
from pagemill.messages import SchedulerOutput
from pagemill.speculation.base import Proposer


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is to be computed behind the known tokens of a step."""

    counts: NDArray[np.int64] | None = None  # [num_seqs]; None: no sequence has a draft
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by index in `scheduled`


NO_DRAFTS_MADE = Drafts()


class Drafter:
    """A proposer over the rows of one rank."""

    def __init__(self, proposer: Proposer, table: RequestTable) -> None:
        self._proposer = proposer
        self._table = table

    def end_rows(self, seq_ids: Sequence[int]) -> None:
        """Let the proposer see rows that are about to be dropped."""
        if seq_ids:
            self._proposer.end_rows(self._table, seq_ids)

    def begin(self, step: SchedulerOutput) -> None:
        """Let the proposer see the step; the table has its rows and blocks."""
        self._proposer.begin_step(self._table, step)

    def draft(self, step: SchedulerOutput) -> Drafts:
        """Put drafts into the table where the step has room for them, and return them."""
        indices = [i for i, part in enumerate(step.scheduled) if part.num_drafts]
        if not indices:
            return NO_DRAFTS_MADE
        parts = [step.scheduled[i] for i in indices]
        counts = np.zeros(len(step.scheduled), np.int64)
        tokens: dict[int, tuple[int, ...]] = {}
        rows = self._table.rows(parts)
        proposed = self._proposer.propose(self._table, parts)
        for index, row, part, draft in zip(indices, rows.tolist(), parts, proposed, strict=True):
            if not len(draft):
                continue
            assert len(draft) <= part.num_drafts, "more drafts than there are slots for"
            self._table.put_drafts(row, draft)
            counts[index] = len(draft)
            tokens[index] = tuple(draft.tolist())
        return Drafts(counts, tokens) if tokens else NO_DRAFTS_MADE
