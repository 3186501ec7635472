"""How the plain-torch backend cuts a ragged step into tiles. Owned and called by `torch_ref`.

A tile is a rectangle of queries: n sequences with m query tokens each, whose keys are gathered together.

    many sequences, few queries (decode)     sequences with equal m and about equal key counts share a
                                             tile; keys are padded to a length that depends on the
                                             sequence alone, never on the others in the tile
    one sequence, many queries (prefill)     query rows are cut into tiles; the keys are gathered once
                                             and a tile uses the columns up to its last query
    more keys than SEGMENT_KEYS              a tile of one sequence, its keys in several parts

Blocks that a sliding window hides from a whole tile are not gathered. Padding repeats the sequence's own
last block, so no tile reads another sequence's keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.attention.base import AttentionBatch

SEGMENT_KEYS = 4096  # most keys of one softmax; more are merged part by part
GATHER_BYTES = 2 << 20  # keys of a tile of several sequences: about a core's second-level cache
SCORE_BYTES = 4 << 20  # float32 scores of a tile, unless MIN_ROWS need more
MIN_ROWS, MAX_ROWS = 32, 64  # queries of a prefill tile
PAD_KEYS = 64  # finest step of padded key counts


@dataclass(frozen=True, slots=True)
class LayoutShape:
    """What of a layer decides the tiles; layers that agree share them."""

    num_heads: int
    num_kv_heads: int
    key_bytes: int  # of one head's key of one token, in the cache's dtype
    sliding_window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Blocks that are copied side by side, one head after the other."""

    index: Tensor  # [n * num_kv_heads * blocks] int64, rows of the pool seen as (block, head)
    num_seqs: int
    num_keys: int  # a sequence and head: blocks * block_size


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The columns of a gather that one tile attends to, and what it may not see of them."""

    gather: Gather
    begin: int
    end: int
    # (first column, end, hidden [n, 1, 1, m, columns] bool); columns count from `begin`.
    masks: tuple[tuple[int, int, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """n sequences with m queries each."""

    rows: slice | Tensor  # of q: a slice for consecutive rows, else [n * m] int64
    n: int
    m: int
    parts: tuple[Part, ...]


def padded_keys(num_keys: int, block_size: int) -> int:
    """Return a key count that sequences of like length share: at most an eighth over, in blocks."""
    step = max(PAD_KEYS, (1 << (num_keys.bit_length() - 1)) // 8)
    padded = -(-num_keys // step) * step
    return -(-padded // block_size) * block_size


def tile_rows(num_heads: int, num_keys: int) -> int:
    """Return how many queries a prefill tile has, so that its scores stay near SCORE_BYTES."""
    keys = max(1, min(num_keys, SEGMENT_KEYS))
    fitting = SCORE_BYTES // (4 * num_heads * keys)
    return max(MIN_ROWS, min(MAX_ROWS, fitting // MIN_ROWS * MIN_ROWS))


def build_layout(batch: AttentionBatch, shape: LayoutShape) -> tuple[Tile, ...]:
    """Return the tiles of a step; together they hold every query row once."""
    return _Builder(batch, shape).build()


class _Builder:
    def __init__(self, batch: AttentionBatch, shape: LayoutShape) -> None:
        self._batch = batch
        self._shape = shape
        self._block_size = batch.block_size
        self._device = batch.block_tables.device
        self._heads = torch.arange(shape.num_kv_heads, device=self._device).view(1, -1, 1)
        self._segment = max(1, SEGMENT_KEYS // batch.block_size) * batch.block_size

    def build(self) -> tuple[Tile, ...]:
        tiles: list[Tile] = []
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        starts, computed = self._batch.query_starts, self._batch.num_computed
        for seq, context in enumerate(computed):
            m = starts[seq + 1] - starts[seq]
            if m == 0:
                continue
            span = context + m - self._first_key(context)
            padded = padded_keys(span, self._block_size)
            if padded <= self._segment and m <= tile_rows(self._shape.num_heads, padded):
                groups[m, padded].append(seq)
            else:
                tiles += self._tiles_of_one(seq, context, m)
        for (m, padded), seqs in sorted(groups.items()):
            most = self._most_sequences(m, padded)
            for i in range(0, len(seqs), most):
                tiles.append(self._tile_of_many(seqs[i : i + most], m, padded))
        return tuple(tiles)

    def _first_key(self, position: int) -> int:
        """Return the first position, a block's first, that is gathered for a query at `position`."""
        window = self._shape.sliding_window
        first = 0 if window is None else max(0, position - window + 1)
        return first // self._block_size * self._block_size

    def _most_sequences(self, m: int, num_keys: int) -> int:
        gathered = self._shape.num_kv_heads * num_keys * self._shape.key_bytes
        scores = 4 * self._shape.num_heads * m * num_keys
        return max(1, min(GATHER_BYTES // gathered, SCORE_BYTES // scores))

    def _tile_of_many(self, seqs: Sequence[int], m: int, num_keys: int) -> Tile:
        starts, computed = self._batch.query_starts, self._batch.num_computed
        contexts = [computed[seq] for seq in seqs]
        firsts = [self._first_key(context) for context in contexts]
        lengths = [context + m for context in contexts]
        gather = self._gather(seqs, firsts, lengths, num_keys)
        part = self._part(gather, (0, num_keys), contexts, m, firsts)
        rows: slice | Tensor = slice(starts[seqs[0]], starts[seqs[0]] + len(seqs) * m)
        if any(starts[seq] != starts[seqs[0]] + i * m for i, seq in enumerate(seqs)):
            of_seqs = self._ints([starts[seq] for seq in seqs]).unsqueeze(1)
            rows = (of_seqs + torch.arange(m, device=self._device)).flatten()
        return Tile(rows, len(seqs), m, (part,))

    def _tiles_of_one(self, seq: int, context: int, m: int) -> list[Tile]:
        """Cut one sequence's queries into tiles that share a gather where its keys are few enough."""
        start = self._batch.query_starts[seq]
        length = context + m
        first = self._first_key(context)
        num_keys = -(-(length - first) // self._block_size) * self._block_size
        shared = None
        if num_keys <= self._segment:
            shared = self._gather([seq], [first], [length], num_keys)
        step = tile_rows(self._shape.num_heads, length - first)
        tiles = []
        for a in range(context, length, step):
            b = min(a + step, length)
            if shared is not None:
                columns = (self._first_key(a) - first, b - first)
                parts = [self._part(shared, columns, [a], b - a, [first])]
            else:
                parts = self._parts_of_long(seq, a, b)
            rows = slice(start + a - context, start + b - context)
            tiles.append(Tile(rows, 1, b - a, tuple(parts)))
        return tiles

    def _parts_of_long(self, seq: int, a: int, b: int) -> list[Part]:
        """Return the key parts of queries at positions [a, b), each with a gather of its own."""
        parts = []
        for begin in range(self._first_key(a), b, self._segment):
            end = min(begin + self._segment, b)
            num_keys = -(-(end - begin) // self._block_size) * self._block_size
            gather = self._gather([seq], [begin], [end], num_keys)
            parts.append(self._part(gather, (0, end - begin), [a], b - a, [begin]))
        return parts

    def _gather(
        self, seqs: Sequence[int], firsts: Sequence[int], ends: Sequence[int], num_keys: int
    ) -> Gather:
        """Gather num_keys positions a sequence from its `first` on; past `end`, its last block again."""
        size = self._block_size
        if len(seqs) == 1:
            begin, last = firsts[0] // size, (ends[0] - 1) // size
            blocks = self._batch.block_tables[seqs[0], begin : last + 1].unsqueeze(0)
            missing = num_keys // size - (last + 1 - begin)
            if missing:
                blocks = torch.cat((blocks, blocks[:, -1:].expand(1, missing)), dim=1)
        else:
            columns = self._ints([first // size for first in firsts]).unsqueeze(1)
            columns = columns + torch.arange(num_keys // size, device=self._device)
            last_column = self._ints([(end - 1) // size for end in ends]).unsqueeze(1)
            table = self._batch.block_tables[self._ints(seqs)]
            blocks = table.gather(1, columns.minimum(last_column))
        index = blocks.unsqueeze(1) * self._shape.num_kv_heads + self._heads
        return Gather(index.flatten(), len(seqs), num_keys)

    def _part(
        self,
        gather: Gather,
        columns: tuple[int, int],
        queries: Sequence[int],
        m: int,
        firsts: Sequence[int],
    ) -> Part:
        """Return a part with its masks; sequence i's queries stand at queries[i] .. queries[i] + m."""
        begin, end = columns
        # Column c of sequence i is the key at position firsts[i] + c; `at` is a query's own column.
        at = [query - first for query, first in zip(queries, firsts, strict=True)]
        spans = []
        future = max(begin, min(at) + 1)
        window = self._shape.sliding_window
        past = begin if window is None else min(end, max(at) + m - window)
        if past > begin:
            spans.append((begin, past))
        if future < end:
            spans.append((future, end))
        if len(spans) == 2 and past >= future:
            spans = [(begin, end)]
        masks = []
        own = self._ints(at).view(-1, 1, 1, 1, 1) + torch.arange(m, device=self._device).view(-1, 1)
        for low, high in spans:
            column = torch.arange(low, high, device=self._device)
            hidden = column > own
            if window is not None:
                hidden |= column <= own - window
            masks.append((low - begin, high - begin, hidden))
        return Part(gather, begin, end, tuple(masks))

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
