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

Ints = NDArray[np.int64]

_SPARE_BLOCKS = 16  # columns of a kept block table beyond the longest sequence's


class InputBuilder:
    """Builds the batch of each step over one table. A batch is valid until the next one is built."""

    def __init__(
        self,
        table: RequestTable,
        block_size: int,
        device: torch.device,
        more_sizes: Sequence[int] = (),
    ) -> None:
        """`more_sizes` are the tokens a block of further kinds of layers."""
        self._table = table
        self._block_size = block_size
        self._more_sizes = tuple(more_sizes)
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
            self._table,
            scheduled,
            self._block_size,
            self._device,
            num_drafted,
            self._more_sizes,
        )
        decodes = num_drafted is None and batch.samples_every_token and batch.prompt is None
        # Tensors elsewhere than in the host's memory are copies, which do not move on with the arrays.
        if decodes and self._device.type == "cpu":
            self._decoding = _Decoding(batch, scheduled)
        return batch


class _KindArrays:
    """Slots and block tables of one kind of layers in a decode step, as arrays that move on in place."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._slots = batch.slot_mapping.numpy()  # a view of the batch's tensor
        self._blocks = np.pad(batch.block_tables.numpy(), ((0, 0), (0, _SPARE_BLOCKS)))
        self._block_tables = torch.from_numpy(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens of a sequence the table has room for."""
        return int(self._blocks.shape[1]) * self._batch.block_size

    def has_room(self, start: int, block_ids: tuple[int, ...]) -> bool:
        """Return whether this change is one of a table that goes on, and there is room for it."""
        return not block_ids or 0 < start <= self._blocks.shape[1] - len(block_ids)

    def advance(self) -> None:
        """Move the slots one token on, inside their blocks."""
        self._slots += 1

    def enter(self, i: int, position: int, start: int, num_blocks: int, row: Ints) -> None:
        """Take what changed in sequence i's table `row`, or where a token begins a block."""
        size = self._batch.block_size
        if num_blocks:
            self._blocks[i, start : start + num_blocks] = row[start : start + num_blocks]
        if num_blocks or position % size == 0:
            block, offset = divmod(position, size)
            # It may have come in an earlier step, with slots for drafts that there were none of.
            self._blocks[i, block] = row[block]
            self._slots[i] = row[block] * size + offset

    def batch(self, num_computed: tuple[int, ...]) -> AttentionBatch:
        """Return the batch of the step."""
        batch = self._batch
        return AttentionBatch(
            query_starts=batch.query_starts,
            num_computed=num_computed,
            block_tables=self._block_tables,
            slot_mapping=batch.slot_mapping,
            block_size=batch.block_size,
            kind=batch.kind,
        )


class _Decoding:
    """The arrays of a decode step, which later steps of the same sequences move on."""

    def __init__(self, batch: ModelInput, scheduled: Sequence[ScheduledSequence]) -> None:
        self._batch = batch
        self._seq_ids = [part.seq_id for part in scheduled]
        self._num_computed = batch.attention.num_computed
        # Views of the batch's tensors.
        self._positions = batch.positions.numpy()
        self._token_ids = batch.token_ids.numpy()
        self._kind = _KindArrays(batch.attention)
        self._more = [_KindArrays(other) for other in batch.more_attention]

    def is_continued_by(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Return whether each of the sequences, and no other, computes and samples its next token.

        One that has lost its row in between comes with blocks from column 0 on.
        """
        if len(scheduled) != len(self._seq_ids):
            return False
        num_tokens, has_room = self._kind.num_tokens, self._kind.has_room
        for part, seq_id, before in zip(scheduled, self._seq_ids, self._num_computed, strict=True):
            if (
                part.seq_id != seq_id
                or part.num_computed != before + 1
                or part.num_tokens != 1
                or part.num_samples == 0
                or part.prompt_logprobs_from is not None
                or part.num_computed >= num_tokens
                or (part.block_ids and not has_room(part.block_start, part.block_ids))
            ):
                return False
        return not self._more or all(self._fits_more(part) for part in scheduled)

    def _fits_more(self, part: ScheduledSequence) -> bool:
        return all(
            part.num_computed < kind.num_tokens and kind.has_room(*change)
            for kind, change in zip(self._more, part.more_blocks, strict=True)
        )

    def advance(self, table: RequestTable, scheduled: Sequence[ScheduledSequence]) -> ModelInput:
        """Move every array one token on, and return the batch of the step."""
        batch = self._batch
        size = batch.attention.block_size
        self._positions += 1
        self._token_ids[:] = table.token_ids[batch.rows, self._positions]
        self._kind.advance()
        for i, part in enumerate(scheduled):
            if part.block_ids or part.num_computed % size == 0:
                row = table.block_tables[batch.rows[i]]
                self._kind.enter(i, part.num_computed, part.block_start, len(part.block_ids), row)
        for number, (kind, tables) in enumerate(zip(self._more, table.more_tables, strict=True)):
            kind.advance()
            for i, part in enumerate(scheduled):
                start, block_ids = part.more_blocks[number]
                row = tables[batch.rows[i]]
                kind.enter(i, part.num_computed, start, len(block_ids), row)
        self._num_computed = tuple([part.num_computed for part in scheduled])
        return ModelInput(
            token_ids=batch.token_ids,
            positions=batch.positions,
            attention=self._kind.batch(self._num_computed),
            rows=batch.rows,
            sampled=batch.sampled,
            sample_rows=batch.sample_rows,
            prompt=None,
            more_attention=tuple([kind.batch(self._num_computed) for kind in self._more]),
        )
