"""The step's batch, made from the one before where nothing but positions has moved on.

In decoding, a step has the sequences of the step before, in their order, each one token further. Its batch
is that step's with every position, slot and token id moved on in place: a fraction of what building it
costs, when Python's own code and data have just been driven out of the caches by the weights. Any other
step is built anew. Owned by `worker.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.attention.base import AttentionBatch
from pagemill.batch.model_input import ModelInput, build_model_input
from pagemill.batch.request_table import RequestTable
from pagemill.messages import ScheduledSequence

_SPARE_BLOCKS = 16  # columns of a kept block table beyond the longest sequence's


class InputBuilder:
    """Builds the batch of each step over one table. A batch is valid until the next one is built."""

    def __init__(self, table: RequestTable, block_size: int, device: torch.device) -> None:
        self._table = table
        self._block_size = block_size
        self._device = device
        self._decoding: _Decoding | None = None

    def build(
        self,
        scheduled: Sequence[ScheduledSequence],
        num_drafted: NDArray[np.int64] | None = None,
    ) -> ModelInput:
        """Return the flat batch of one step; arguments as `build_model_input`'s."""
        decoding = self._decoding
        if num_drafted is None and decoding is not None and decoding.is_continued_by(scheduled):
            return decoding.advance(self._table, scheduled)
        self._decoding = None
        batch = build_model_input(
            self._table, scheduled, self._block_size, self._device, num_drafted
        )
        decodes = num_drafted is None and batch.samples_every_token and batch.prompt is None
        # Tensors elsewhere than in the host's memory are copies, which do not move on with the arrays.
        if decodes and self._device.type == "cpu":
            self._decoding = _Decoding(batch, scheduled)
        return batch


class _Decoding:
    """The arrays of a decode step, which later steps of the same sequences move on."""

    def __init__(self, batch: ModelInput, scheduled: Sequence[ScheduledSequence]) -> None:
        attention = batch.attention
        self._batch = batch
        self._seq_ids = [part.seq_id for part in scheduled]
        self._num_computed = attention.num_computed
        # Views of the batch's tensors.
        self._positions = batch.positions.numpy()
        self._token_ids = batch.token_ids.numpy()
        self._slots = attention.slot_mapping.numpy()
        held = attention.block_tables.numpy()
        self._blocks = np.pad(held, ((0, 0), (0, _SPARE_BLOCKS)))
        self._block_tables = torch.from_numpy(self._blocks)

    def is_continued_by(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Return whether each of the sequences, and no other, computes and samples its next token.

        One that has lost its row in between comes with blocks from column 0 on.
        """
        if len(scheduled) != len(self._seq_ids):
            return False
        width, size = self._blocks.shape[1], self._batch.attention.block_size
        for part, seq_id, before in zip(scheduled, self._seq_ids, self._num_computed, strict=True):
            if (
                part.seq_id != seq_id
                or part.num_computed != before + 1
                or part.num_tokens != 1
                or part.num_samples == 0
                or part.prompt_logprobs_from is not None
                or part.num_computed >= width * size
                or (part.block_ids and not 0 < part.block_start <= width - len(part.block_ids))
            ):
                return False
        return True

    def advance(self, table: RequestTable, scheduled: Sequence[ScheduledSequence]) -> ModelInput:
        """Move every array one token on, and return the batch of the step."""
        batch = self._batch
        size = batch.attention.block_size
        self._positions += 1
        self._slots += 1
        self._token_ids[:] = table.token_ids[batch.rows, self._positions]
        for i, part in enumerate(scheduled):
            if part.block_ids:
                end = part.block_start + len(part.block_ids)
                self._blocks[i, part.block_start : end] = part.block_ids
            if part.block_ids or part.num_computed % size == 0:
                block, offset = divmod(part.num_computed, size)
                # It may have come in an earlier step, with slots for drafts that there were none of.
                self._blocks[i, block] = table.block_tables[batch.rows[i], block]
                self._slots[i] = self._blocks[i, block] * size + offset
        self._num_computed = tuple([part.num_computed for part in scheduled])
        return ModelInput(
            token_ids=batch.token_ids,
            positions=batch.positions,
            attention=AttentionBatch(
                query_starts=batch.attention.query_starts,
                num_computed=self._num_computed,
                block_tables=self._block_tables,
                slot_mapping=batch.attention.slot_mapping,
                block_size=size,
            ),
            rows=batch.rows,
            sampled=batch.sampled,
            sample_rows=batch.sample_rows,
            prompt=None,
        )
