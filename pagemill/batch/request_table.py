"""What a rank remembers of live sequences: one permanent row each.

A row is made from a `NewSequence`, follows the scheduler's block changes, and is lost when its id is
listed as removed. Between two steps the rank appends the tokens it sampled itself, so a step message
carries no tokens of sequences that go on. Owned by `worker.model_runner`; read by `build_model_input`
and the sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence

D = TypeVar("D", np.int32, np.int64)

_FIRST_ROWS = 16
_FIRST_TOKENS = 256
_FIRST_BLOCKS = 16


class RequestTable:
    """Rows of live sequences in numpy arrays that grow by doubling.

    token_ids     [rows, tokens] int32   prompt, then output; in a step with drafts those behind
    block_tables  [rows, blocks] int64   block ids by block position
    more_tables   the same for further kinds of layers, one array each
    num_tokens    [rows] int64           known tokens of a row

    Where blocks of several kinds share a pool, `strides` says for each kind as how many blocks one counts there:
    tables hold block id * stride, which is what its layers' views of the pool are indexed by (see `kv_store`).
    """

    def __init__(self, strides: Sequence[int] = (1,)) -> None:
        self._strides = tuple(strides)
        self.token_ids: NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_TOKENS), np.int32)
        self.block_tables: NDArray[np.int64] = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int64)
        self.more_tables: list[NDArray[np.int64]] = [
            np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int64) for _ in strides[1:]
        ]
        self.num_tokens: NDArray[np.int64] = np.zeros(_FIRST_ROWS, np.int64)
        self._num_prompt_tokens = [0] * _FIRST_ROWS
        self._sample_index = [0] * _FIRST_ROWS
        self._specs: list[SamplingSpec | None] = [None] * _FIRST_ROWS
        self._row_of: dict[int, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._row_of

    def remove(self, seq_ids: Iterable[int]) -> None:
        """Drop rows. An id without a row is passed over: its adding step may never have come."""
        for seq_id in seq_ids:
            row = self._row_of.pop(seq_id, None)
            if row is not None:
                self._specs[row] = None
                self.num_tokens[row] = 0
                self._free.append(row)

    def add(self, sequences: Iterable[NewSequence]) -> None:
        """Give each sequence a row."""
        for new in sequences:
            assert new.seq_id not in self._row_of, f"sequence {new.seq_id} has a row already"
            if not self._free:
                self._grow_rows()
            row = self._free.pop()
            count = len(new.token_ids)
            self._reserve_tokens(count)
            self.token_ids[row, :count] = new.token_ids
            self.num_tokens[row] = count
            self._num_prompt_tokens[row] = new.num_prompt_tokens
            self._sample_index[row] = new.sample_index
            self._specs[row] = new.sampling
            self._row_of[new.seq_id] = row

    def set_blocks(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Write the changed parts of block tables."""
        for part in scheduled:
            if part.block_ids:
                end = part.block_start + len(part.block_ids)
                self._reserve_blocks(end)
                row = self._row_of[part.seq_id]
                self.block_tables[row, part.block_start : end] = part.block_ids
                if self._strides[0] != 1:
                    self.block_tables[row, part.block_start : end] *= self._strides[0]
            if part.more_blocks:
                self._set_more(part)

    def _set_more(self, part: ScheduledSequence) -> None:
        row = self._row_of[part.seq_id]
        for kind, (start, block_ids) in enumerate(part.more_blocks):
            if block_ids:
                end = start + len(block_ids)
                if end > self.more_tables[kind].shape[1]:
                    self.more_tables[kind] = _widen(self.more_tables[kind], end)
                blocks = np.array(block_ids, np.int64) * self._strides[kind + 1]
                self.more_tables[kind][row, start:end] = blocks

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Add sampled tokens to a row."""
        row = self._row_of[seq_id]
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        self._reserve_tokens(end)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def put_drafts(self, row: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Write draft tokens behind the known ones of a row; they are not known by that."""
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        self._reserve_tokens(end)
        self.token_ids[row, start:end] = token_ids

    def rows(self, scheduled: Sequence[ScheduledSequence]) -> NDArray[np.int64]:
        """Return the row of each scheduled sequence."""
        row_of = self._row_of
        return np.fromiter((row_of[s.seq_id] for s in scheduled), np.int64, len(scheduled))

    def row(self, seq_id: int) -> int:
        """Return the row of a sequence."""
        return self._row_of[seq_id]

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Return a view of a row's tokens, prompt then output."""
        return self.token_ids[row, : self.num_tokens[row]]

    def num_prompt_tokens(self, row: int) -> int:
        """Return how many of a row's tokens are the prompt."""
        return self._num_prompt_tokens[row]

    def sample_index(self, row: int) -> int:
        """Return which sample of its request a row is."""
        return self._sample_index[row]

    def spec(self, row: int) -> SamplingSpec:
        """Return what the sampler needs of a row's request."""
        spec = self._specs[row]
        assert spec is not None, f"row {row} is free"
        return spec

    def _grow_rows(self) -> None:
        old = len(self._specs)
        self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self.more_tables = [np.concatenate([t, np.zeros_like(t)]) for t in self.more_tables]
        self.num_tokens = np.concatenate([self.num_tokens, np.zeros_like(self.num_tokens)])
        self._num_prompt_tokens += [0] * old
        self._sample_index += [0] * old
        self._specs += [None] * old
        self._free = list(range(2 * old - 1, old - 1, -1))

    def _reserve_tokens(self, count: int) -> None:
        if count > self.token_ids.shape[1]:
            self.token_ids = _widen(self.token_ids, count)

    def _reserve_blocks(self, count: int) -> None:
        if count > self.block_tables.shape[1]:
            self.block_tables = _widen(self.block_tables, count)


def _widen(old: NDArray[D], columns: int) -> NDArray[D]:
    width = old.shape[1]
    while width < columns:
        width *= 2
    new = np.zeros((old.shape[0], width), old.dtype)
    new[:, : old.shape[1]] = old
    return new
