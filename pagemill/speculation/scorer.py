"""What the target model is to sample when drafts are computed with a step: one row a position.

A sequence with known tokens t0..tn and drafts d1..dk computes tn and the drafts. The logits after tn choose
the next token as in any step; those after dj choose the one after it, as if d1..dj were known: penalties,
bad words, `min_tokens` and processors see them, and the random number is that of their position.
Called by `worker.model_runner`.
"""

from __future__ import annotations

import dataclasses

from pagemill.batch.request_table import RequestTable
from pagemill.sampling.row_math import SampleRow


def scored_rows(table: RequestTable, row: int, last: SampleRow, num_drafts: int) -> list[SampleRow]:
    """Return the rows of a sequence, `last` that of its last known token, then one a draft.

    The drafts stand in the table behind the known tokens (`RequestTable.put_drafts`).
    """
    assert not num_drafts or last.num_samples == 1, "drafts follow a single sample"
    num_known = len(last.token_ids)
    return [last] + [
        dataclasses.replace(last, token_ids=table.token_ids[row, : num_known + count])
        for count in range(1, num_drafts + 1)
    ]
