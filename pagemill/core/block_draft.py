"""The pool as it would be after what is planned so far: counts, laid over the real tables.

The plan of a step counts blocks here and never names them; what it finds in a cache it does name. Layers of several
kinds have a table each, over one pool of blocks: what is asked here is summed over the kinds. Owned by the planner.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain, repeat
from typing import Protocol

from pagemill.cache_layout import CacheKind, CacheLayout
from pagemill.core.block_manager import HOLE
from pagemill.core.host_tier import SwappedTable
from pagemill.core.prefix_cache import NO_HITS, HostSlot, PrefixHits
from pagemill.core.sequence import Sequence

Found = int | HostSlot | None  # as in PrefixHits


class BlockView(Protocol):
    """What the planner reads of the block manager."""

    layout: CacheLayout

    @property
    def num_free(self) -> int:
        """Return how many blocks the step may take."""
        ...

    def table(self, seq_id: int) -> list[int]:
        """Return the blocks of a sequence, of the first kind of layers, to be read only."""
        ...

    def tables(self, seq_id: int) -> list[list[int]]:
        """Return the blocks of a sequence for each kind of layers, to be read only."""
        ...

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        ...

    def find(self, name: bytes) -> int | None:
        """Return the block with these contents, or None."""
        ...

    def find_slot(self, name: bytes) -> int | None:
        """Return the slot of the host tier with these contents, if bringing them back pays."""
        ...

    def swapped(self, seq_id: int) -> SwappedTable | None:
        """Return what a swapped sequence has in the host tier."""
        ...


class BlockDraft:
    """Counts of free blocks and of what each sequence holds, after what is planned."""

    def __init__(self, view: BlockView) -> None:
        self.free = view.num_free
        self.lets_go = view.layout.lets_go  # a sequence may never need all of its blocks at once
        self._view = view
        self._kinds = view.layout.kinds
        self._size = self._kinds[0].block_tokens
        self._has_more = len(self._kinds) > 1
        self._refs: dict[int, int] = {}  # planned ref counts, where they differ
        self._charged: dict[int, tuple[int, list[int]]] = {}  # seq_id -> (new blocks, left blocks)
        # seq_id -> length of each table after what is planned, where they differ
        self._lengths: dict[int, list[int]] = {}
        self._sealed: set[bytes] = set()  # by the shares planned so far

    # ------------------------------------------------------------ what fits

    def take_slot(self, sequence: Sequence) -> bool:
        """Take the place of a sequence's one token left, if it costs nothing: a block of its own has it."""
        table = self._view.table(sequence.seq_id)
        index = sequence.num_computed // self._size
        if index >= len(table) or self._ref(table[index]) != 1:
            return False
        if self._has_more:
            for kind, table in zip(self._kinds, self._view.tables(sequence.seq_id), strict=True):
                index = sequence.num_computed // kind.block_tokens
                if index >= len(table) or self._ref(table[index]) != 1:
                    return False
        if self._has_more or sequence.num_tokens % self._size == 0:
            self.seal(sequence, sequence.num_computed, sequence.num_tokens)
        return True

    def tokens_that_fit(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of the next `wanted` tokens the free blocks allow."""
        tables = self._view.tables(sequence.seq_id)
        room = self.free - len(self._shared(sequence, tables))
        if room < 0:
            return 0
        return self._fitting([len(t) for t in tables], sequence.num_computed, wanted, room)

    def more_that_fit(self, sequence: Sequence, end: int, wanted: int, set_aside: int = 0) -> int:
        """Return how many of `wanted` tokens past a share that ends at `end` the free blocks allow.

        `set_aside` of the free blocks are not for these.
        """
        room = max(0, self.free - set_aside)
        return self._fitting(self._lengths_of(sequence), end, wanted, room)

    def first_that_fit(
        self, sequence: Sequence, hits: PrefixHits, wanted: int, set_aside: int
    ) -> int:
        """Return how many of `wanted` tokens after `hits` fit, for one whose `cost_of_all` is there."""
        tables = self._view.tables(sequence.seq_id)
        taken = self._num_taken(hits) + len(self._shared(sequence, tables))
        start = sequence.num_computed + hits.num_tokens
        room = self.free - set_aside - taken
        return self._fitting(self._begun(tables, hits), start, wanted, room)

    def outstanding(self, sequence: Sequence, start: int, end: int) -> int:
        """Return how many blocks the known tokens behind a share [start, end) need beyond those held then.

        What a window lets go of when the share is computed counts as held: it comes back before it is needed.
        """
        lengths = self._lengths_of(sequence)
        return sum(
            max(0, kind.most_held(end, sequence.num_tokens) - (length - kind.first_block(start)))
            for kind, length in zip(self._kinds, lengths, strict=True)
        )

    def cost_of_all(self, sequence: Sequence, hits: PrefixHits) -> int:
        """Return how many blocks all known tokens need at once, those found that nobody holds included."""
        tables = self._view.tables(sequence.seq_id)
        start = sequence.num_computed + hits.num_tokens
        num_missing = sum(
            max(0, kind.most_held(start, sequence.num_tokens) - (length - kind.first_block(start)))
            for kind, length in zip(self._kinds, self._begun(tables, hits), strict=True)
        )
        return num_missing + self._num_taken(hits) + len(self._shared(sequence, tables))

    def frees_any(self, sequence: Sequence) -> bool:
        """Return whether releasing a waiting sequence frees a block at once.

        Whoever shares a sequence's last block shares all before it, so the last one tells; of a window, others
        may have let go of blocks further in front.
        """
        for kind, table in zip(self._kinds, self._view.tables(sequence.seq_id), strict=True):
            asked = table[-1:] if kind.window is None else table
            if any(block != HOLE and self._ref(block) == 1 for block in asked):
                return True
        return False

    # ------------------------------------------------------------ what is found

    def hits(self, sequence: Sequence) -> PrefixHits:
        """Return the longest prefix that a sequence without blocks may begin with."""
        if sequence.num_computed or self._view.table(sequence.seq_id):
            return NO_HITS
        swapped = self._view.swapped(sequence.seq_id)
        if swapped is not None:
            return self._way_back(sequence, swapped)
        if self.lets_go:
            return self._found_with_windows(sequence)
        found = self._leading(sequence.block_names, sequence.most_cached // self._size)
        return PrefixHits(tuple(found), len(found) * self._size)

    def _leading(self, names: Seq[bytes], most: int) -> list[Found]:
        """Return what is found of the first `most` blocks, up to the first that is not."""
        found: list[Found] = []
        for name in names[:most]:
            block = self._find(name)
            if block is None and name not in self._sealed:
                break
            found.append(block)
        return found

    def _find(self, name: bytes) -> Found:
        """Return where a block's contents are; None: an earlier share of the step fills it, or nowhere."""
        block = self._view.find(name)
        if block is not None or name in self._sealed:
            return block
        slot = self._view.find_slot(name)
        return None if slot is None else HostSlot(slot)

    def _found_with_windows(self, sequence: Sequence) -> PrefixHits:
        """Return the longest prefix of which windows find what they see, and the others all."""
        limit = sequence.most_cached
        found: list[dict[int, Found]] = []
        for kind, names in self._named(sequence):
            if kind.window is None:
                leading = self._leading(names, limit // kind.block_tokens)
                found.append(dict(enumerate(leading)))
                limit = min(limit, len(leading) * kind.block_tokens)
            else:
                found.append({})
                limit = min(limit, len(names) * kind.block_tokens)
        step = self._view.layout.step_tokens
        end = limit // step * step
        while end:
            shorter = end
            for (kind, names), known in zip(self._named(sequence), found, strict=True):
                shorter = min(shorter, self._seen_from(end, kind, names, known))
            if shorter == end:
                break
            end = shorter // step * step
        if not end:
            return NO_HITS
        blocks = [
            known[index]
            for kind, known in zip(self._kinds, found, strict=True)
            for index in range(kind.first_block(end), kind.blocks_of(end))
        ]
        return PrefixHits(tuple(blocks), end)

    def _seen_from(
        self, end: int, kind: CacheKind, names: Seq[bytes], known: dict[int, Found]
    ) -> int:
        """Return `end` if all is found that a token there sees, else the end of a shorter prefix to try.

        What is found goes into `known`.
        """
        for index in range(kind.blocks_of(end) - 1, kind.first_block(end) - 1, -1):
            if index in known:
                continue
            block = self._find(names[index])
            if block is None and names[index] not in self._sealed:
                return index * kind.block_tokens
            known[index] = block
        return end

    def _way_back(self, sequence: Sequence, swapped: SwappedTable) -> PrefixHits:
        """Return what a swapped sequence held; what the device pool has besides is not copied."""
        end = swapped.num_tokens
        slots = iter(swapped.slots)
        blocks: list[Found] = []
        for kind, names in self._named(sequence):
            num_named = min(len(names), end // kind.block_tokens)
            for index in range(kind.first_block(end), kind.blocks_of(end)):
                block: Found = HostSlot(next(slots))
                if index < num_named:
                    here = self._view.find(names[index])
                    if here is not None or names[index] in self._sealed:
                        block = here
                blocks.append(block)
        return PrefixHits(tuple(blocks), end)

    # ------------------------------------------------------------ what is planned

    def claim(self, sequence: Sequence, hits: PrefixHits) -> None:
        """Hold what a sequence begins with; what is copied in can be found by later shares."""
        if hits is NO_HITS:
            return
        for kind, names in self._named(sequence):
            stop = hits.num_tokens // kind.block_tokens
            self._sealed.update(names[kind.first_block(hits.num_tokens) : stop])
        for block in hits.blocks:
            if isinstance(block, int):
                count = self._ref(block)
                self.free -= count == 0
                self._refs[block] = count + 1

    def seal(self, sequence: Sequence, start: int, end: int) -> None:
        """Let later shares find what positions [start, end) fill up."""
        first, stop = start // self._size, end // self._size
        if stop > first:
            self._sealed.update(sequence.block_names[first:stop])
        if self._has_more:
            for kind, names in zip(self._kinds[1:], sequence.more_names, strict=False):
                self._sealed.update(names[start // kind.block_tokens : end // kind.block_tokens])

    def charge(self, sequence: Sequence, num_tokens: int, hits: PrefixHits = NO_HITS) -> None:
        """Take the blocks that computing the next `num_tokens` tokens after `hits` needs."""
        self.claim(sequence, hits)
        tables = self._view.tables(sequence.seq_id)
        shared = self._shared(sequence, tables)
        start = sequence.num_computed + hits.num_tokens
        end = start + num_tokens
        self.seal(sequence, start, end)
        num_new = self._lengthen(sequence, self._begun(tables, hits), end)
        num_new += len(shared) + hits.num_host
        if num_new == 0:
            return
        for block in shared:
            self._refs[block] = self._ref(block) - 1
        self.free -= num_new
        self._charged[sequence.seq_id] = (num_new, shared)

    def charge_more(self, sequence: Sequence, start: int, end: int) -> None:
        """Take what lengthening a share from `start` to `end` needs besides."""
        self.seal(sequence, start, end)
        num_new = self._lengthen(sequence, self._lengths_of(sequence), end)
        self.free -= num_new
        before, shared = self._charged.get(sequence.seq_id, (0, []))
        self._charged[sequence.seq_id] = (before + num_new, shared)

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence was charged and what it holds."""
        self._lengths.pop(sequence.seq_id, None)
        num_new, left = self._charged.pop(sequence.seq_id, (0, []))
        self.free += num_new
        for table in self._view.tables(sequence.seq_id):
            for block in table:
                if block == HOLE or block in left:
                    continue
                self._refs[block] = self._ref(block) - 1
                self.free += self._refs[block] == 0

    # ------------------------------------------------------------ small parts

    def _named(self, sequence: Sequence) -> Seq[tuple[CacheKind, list[bytes]]]:
        """Return each kind with the names of the sequence's blocks of it."""
        names = chain([sequence.block_names], sequence.more_names, repeat([]))
        return list(zip(self._kinds, names, strict=False))

    def _lengths_of(self, sequence: Sequence) -> list[int]:
        planned = self._lengths.get(sequence.seq_id)
        if planned is not None:
            return planned
        return [len(table) for table in self._view.tables(sequence.seq_id)]

    def _begun(self, tables: list[list[int]], hits: PrefixHits) -> list[int]:
        """Return the length of each table when it has begun with `hits`."""
        if hits.num_tokens:
            return [kind.blocks_of(hits.num_tokens) for kind in self._kinds]
        return [len(table) for table in tables]

    def _lengthen(self, sequence: Sequence, lengths: list[int], end: int) -> int:
        """Note the lengths of tables that hold positions up to `end`; return how many blocks are new."""
        needed = [kind.blocks_of(end) for kind in self._kinds]
        longer = [max(pair) for pair in zip(lengths, needed, strict=True)]
        self._lengths[sequence.seq_id] = longer
        return sum(longer) - sum(lengths)

    def _fitting(self, lengths: list[int], start: int, wanted: int, room: int) -> int:
        """Return how many of `wanted` positions from `start` on `room` new blocks hold."""
        if not self._has_more:
            return min(wanted, (lengths[0] + room) * self._size - start)
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            num_new = sum(
                max(0, kind.blocks_of(start + middle) - length)
                for kind, length in zip(self._kinds, lengths, strict=True)
            )
            if num_new <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _num_taken(self, hits: PrefixHits) -> int:
        """Return how many free blocks a found prefix takes."""
        num_claimed = sum(isinstance(b, int) and self._ref(b) == 0 for b in hits.blocks)
        return num_claimed + hits.num_host

    def _ref(self, block: int) -> int:
        planned = self._refs.get(block) if self._refs else None
        return self._view.ref_count(block) if planned is None else planned

    def _shared(self, sequence: Sequence, tables: list[list[int]]) -> list[int]:
        """Return the blocks that the next token goes into, or later ones, that others hold too."""
        shared = []
        for kind, table in zip(self._kinds, tables, strict=True):
            first = sequence.num_computed // kind.block_tokens
            if first < len(table):
                shared += [block for block in table[first:] if self._ref(block) > 1]
        return shared
