"""Block tables: which block holds which positions of which sequence.

Position p of a sequence lies in block `table[p // block_size]`, slot `p % block_size`. Samples of one
request share the blocks of their prompt through ref counts. Nobody writes into a block that another
table holds: the writer gets a block of its own first, and the contents are copied (copy-on-write).

A step's full blocks are sealed when the step is committed: they can be found by whoever is planned after,
in the same step too, since every layer writes a step's keys and values before it reads any.

What a swapped sequence held, and what was evicted, may be in the host tier: it comes back into blocks of the
device pool, as part of the prefix that a sequence begins with.

Layers of several kinds (`cache_layout`) have a table each, over one pool. The table of a window's layers has holes
in front, where the next token does not look any more: those blocks are let go when a step's result is
known (`slide`). How many are holes is a function of the number of computed tokens, for every sequence at any time.

Owned by the scheduler. The planner reads it through `BlockView` and counts what a step would cost;
`extend` then commits and cannot run out, because a commit never costs more than its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, repeat

from pagemill.cache_layout import CacheLayout, plain_layout
from pagemill.core.block_pool import BlockPool
from pagemill.core.host_tier import HostTier, SwappedTable
from pagemill.core.prefix_cache import HostSlot, PrefixHits, extend_names
from pagemill.core.sequence import Sequence
from pagemill.messages import BlockMoves, LostMoves
from pagemill.step_dataclass import step_dataclass

HOLE = -1  # in a table: the block was let go, and nobody looks there any more


@step_dataclass(frozen=True, slots=True)
class TableChange:
    """What `extend` did: `table[start : start + len(block_ids)] = block_ids`, after `copies`."""

    start: int
    block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]  # (from, to)
    more: tuple[TableChange, ...] = ()  # in the tables of further kinds of layers


class BlockManager:
    """The tables of all sequences over one pool. `caches_prefixes`: full blocks are found again."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caches_prefixes: bool = False,
        tier: HostTier | None = None,
        layout: CacheLayout | None = None,
    ) -> None:
        """`layout` None: all layers share one table of blocks of `block_size` tokens."""
        self.layout = layout or plain_layout(block_size)
        self.block_size = self.layout.kinds[0].block_tokens
        self._caches_prefixes = caches_prefixes
        self._pool = BlockPool(num_blocks)
        self._tier = tier
        self._tables: dict[int, list[int]] = {}  # of the first kind
        # Of the others: (kind, its tables). Empty for most models.
        self._more = [(kind, dict[int, list[int]]()) for kind in self.layout.kinds[1:]]
        # Kinds with windows and their tables, in which blocks are let go.
        self._sliding = [
            (kind, tables)
            for kind, tables in [(self.layout.kinds[0], self._tables), *self._more]
            if kind.window is not None
        ]
        self._copies: list[tuple[int, int]] = []  # of the step that is being committed
        # By each step that has no result yet, the oldest first; the last takes what is sealed now.
        self._sealed: list[dict[int, None]] = [{}]
        self._num_open = 0  # steps begun that have no result yet
        self._unsaved: dict[int, None] = {}  # sealed before, and to be kept in a tier that lasts

    # ------------------------------------------------------------ read

    @property
    def num_blocks(self) -> int:
        """Return the size of the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Return how many blocks a step may take."""
        return self._pool.num_free + self._pool.num_cached

    @property
    def usage(self) -> float:
        """Return the share of blocks in use, 0..1."""
        return self._pool.num_used / self._pool.num_blocks

    def table(self, seq_id: int) -> list[int]:
        """Return the blocks of a sequence, to be read only; empty when it holds none."""
        return self._tables.get(seq_id, [])

    def tables(self, seq_id: int) -> list[list[int]]:
        """Return the blocks of a sequence for each kind of layers, to be read only."""
        first = self._tables.get(seq_id, [])
        if not self._more:
            return [first]
        return [first, *[tables.get(seq_id, []) for _, tables in self._more]]

    def holds_any(self, seq_id: int, blocks: frozenset[int]) -> bool:
        """Return whether a sequence holds one of these blocks."""
        return any(not blocks.isdisjoint(table) for table in self.tables(seq_id))

    def num_host_tokens(self, hits: PrefixHits) -> int:
        """Return how many tokens of a found prefix the host tier has, of the kind that needs most."""
        if not hits.num_host:
            return 0
        leading = hits.blocks[: self.layout.kinds[0].num_held(hits.num_tokens)]
        return sum(isinstance(block, HostSlot) for block in leading) * self.block_size

    def holders(self) -> Iterable[int]:
        """Return the ids of the sequences that hold blocks."""
        return self._tables.keys()

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        return self._pool.ref_count(block)

    def find(self, name: bytes) -> int | None:
        """Return the block with these contents, or None."""
        return self._pool.find(name)

    def find_slot(self, name: bytes) -> int | None:
        """Return the slot of the host tier with these contents, if bringing them back pays."""
        return None if self._tier is None else self._tier.find(name)

    def swapped(self, seq_id: int) -> SwappedTable | None:
        """Return what a swapped sequence has in the host tier."""
        return None if self._tier is None else self._tier.table(seq_id)

    def swapped_ids(self) -> list[int]:
        """Return the ids of the swapped sequences."""
        return [] if self._tier is None else self._tier.swapped()

    @property
    def tier_usage(self) -> float:
        """Return the share of the host tier's slots that hold something, 0..1."""
        return 0.0 if self._tier is None else self._tier.usage

    # ------------------------------------------------------------ commit

    def begin_step(self) -> None:
        """Say that the next step is committed from here on; others may be in flight."""
        if self._num_open:
            self._sealed.append({})
        self._num_open += 1

    def name_blocks(self, sequence: Sequence) -> None:
        """Name what the sequence's known tokens fill, so that plans can look it up."""
        if not self._caches_prefixes or sequence.is_nameless:
            return
        num_known = sequence.num_tokens - sequence.num_pending
        num_full = num_known // self.block_size
        if num_full > len(sequence.block_names):
            extend_names(sequence, self.block_size, num_full)
        if self._more:
            if not sequence.more_names:
                sequence.more_names = [[] for _ in self._more]
            for number, (kind, _) in enumerate(self._more):
                extend_names(sequence, kind.block_tokens, num_known // kind.block_tokens, number)

    def claim(self, hits: PrefixHits) -> None:
        """Hold what a plan found. Of a step all is claimed before any block or slot is taken."""
        for block in hits.blocks:
            if isinstance(block, HostSlot):
                assert self._tier is not None
                self._tier.claim(block.slot)
            elif block is not None:
                self._pool.claim(block)

    def begin(self, sequence: Sequence, hits: PrefixHits) -> None:
        """Begin a table with a found prefix; its blocks are claimed, or sealed in this step."""
        assert sequence.seq_id not in self._tables, "a prefix begins a table"
        found = iter(hits.blocks)
        kinds = zip(
            [(self.layout.kinds[0], self._tables), *self._more], _names(sequence), strict=False
        )
        for (kind, tables), names in kinds:
            first, stop = kind.first_block(hits.num_tokens), kind.blocks_of(hits.num_tokens)
            table = [HOLE] * first
            for index in range(first, stop):
                is_full = (index + 1) * kind.block_tokens <= hits.num_tokens
                name = names[index] if is_full and names else None
                table.append(self._held(next(found), name))
            tables[sequence.seq_id] = table
        assert next(found, None) is None, "more blocks than the prefix has"
        if self._tier is not None:
            self._tier.drop(sequence.seq_id, after_step=True)

    def _held(self, found: int | HostSlot | None, name: bytes | None) -> int:
        """Return the block of one that a plan found, held by the table that begins with it."""
        if isinstance(found, HostSlot):
            return self._bring_back(found.slot, name)
        if found is None:
            assert name is not None
            found = self._pool.find(name)
            assert found is not None, "the plan promised that the step seals this block"
            self._pool.claim(found)
        return found

    def _bring_back(self, slot: int, name: bytes | None) -> int:
        assert self._tier is not None
        block = self._take()
        self._tier.swap_in(slot, block)
        if name is not None:
            self._seal(block, name)
        return block

    def _take(self) -> int:
        """Return a block of the pool; the host tier may keep what was in it."""
        block, evicted = self._pool.allocate()
        if evicted is not None and self._tier is not None:
            self._tier.keep(block, evicted)
        return block

    def _seal(self, block: int, name: bytes) -> None:
        self._pool.seal(block, name)
        self._sealed[-1][block] = None

    def seal(self, sequence: Sequence, num_computed: int, num_tokens: int) -> None:
        """Let the blocks be found that positions [num_computed, num_tokens) fill up."""
        if self._more:
            for (kind, tables), names in zip(self._more, sequence.more_names, strict=False):
                size, table = kind.block_tokens, tables[sequence.seq_id]
                for index in range(num_computed // size, min(num_tokens // size, len(names))):
                    self._seal(table[index], names[index])
        if num_computed // self.block_size == num_tokens // self.block_size:
            return
        table, names = self._tables[sequence.seq_id], sequence.block_names
        stop = min(num_tokens // self.block_size, len(names))
        for index in range(num_computed // self.block_size, stop):
            self._seal(table[index], names[index])

    def forget_prefixes(self) -> bool:
        """Let nothing be found that is held now or was; return whether a tier that lasts has to hear of it.

        Called by `Roster.forget_prefixes`: what sequences hold must lose its names there too.
        """
        self._pool.forget()
        if self._tier is None:
            return False
        self._tier.forget()
        return self._tier.saves

    def extend(self, seq_id: int, num_computed: int, num_tokens: int) -> TableChange:
        """Make positions [num_computed, num_tokens) writable: new blocks, and own ones for shared.

        A copy's source stays held by another table, and victims were freed before the first `extend`
        of a step: so within a step no source is a target as well, and the order of copies does not
        matter. The other holder may write into the source in the same step: copies are done before.
        """
        table = self._tables.setdefault(seq_id, [])
        if not self._more:
            size = self.block_size
            last = len(table) - 1
            if (  # nearly every decode
                num_computed // size == last == (num_tokens - 1) // size
                and self._pool.ref_count(table[last]) == 1
            ):
                return TableChange(last + 1, (), ())
            return self._extend(table, size, num_computed, num_tokens)
        change = self._extend(table, self.block_size, num_computed, num_tokens)
        more = [
            self._extend(tables.setdefault(seq_id, []), kind.block_tokens, num_computed, num_tokens)
            for kind, tables in self._more
        ]
        return TableChange(change.start, change.block_ids, change.copies, tuple(more))

    def _extend(
        self, table: list[int], block_tokens: int, num_computed: int, num_tokens: int
    ) -> TableChange:
        num_held = len(table)
        num_needed = -(-num_tokens // block_tokens)
        first = num_computed // block_tokens
        start = num_held
        copies = []
        for index in range(first, min(num_held, num_needed)):
            shared = table[index]
            if self._pool.ref_count(shared) == 1:
                continue
            own = self._take()
            if index * block_tokens < num_computed:  # else it holds nothing yet
                copies.append((shared, own))
            self._pool.release(shared)
            table[index] = own
            start = min(start, index)
        for _ in range(num_held, num_needed):
            table.append(self._take())
        self._copies.extend(copies)
        return TableChange(start, tuple(table[start:]), tuple(copies))

    def trim(self, seq_id: int, num_tokens: int) -> None:
        """Let go of the blocks behind position `num_tokens`: their drafts came to nothing."""
        for kind, table in zip(self.layout.kinds, self.tables(seq_id), strict=True):
            for _ in range(len(table) - kind.blocks_of(num_tokens)):
                self._pool.release(table.pop())

    def slide(self, sequence: Sequence, before: int) -> None:
        """Let go of what fell out of every window when `before` computed tokens became as many as now are.

        To be called with tokens that stand: what is computed behind drafts may be taken back.
        """
        for kind, tables in self._sliding:
            first, stop = kind.first_block(before), kind.first_block(sequence.num_computed)
            if stop <= first:  # nearly every decode; or what was computed was lost since
                continue
            table = tables[sequence.seq_id]
            for index in range(first, stop):
                self._pool.release(table[index])
                table[index] = HOLE

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence the blocks of another, shared."""
        assert child_id not in self._tables, f"sequence {child_id} holds blocks already"
        for tables in (self._tables, *(tables for _, tables in self._more)):
            table = list(tables[parent_id])
            for block in table:
                if block != HOLE:
                    self._pool.share(block)
            tables[child_id] = table

    def swap_out(self, sequence: Sequence) -> bool:
        """Move what a sequence computed to the host tier, if that pays and fits; its blocks are let go.

        Blocks that others hold too stay where they are for them.
        """
        num_tokens = sequence.num_computed
        if self._tier is None or num_tokens == 0:
            return False
        blocks: list[int] = []
        names: list[bytes | None] = []
        kinds = zip(self.layout.kinds, self.tables(sequence.seq_id), _names(sequence), strict=False)
        for kind, table, known in kinds:
            first, stop = kind.first_block(num_tokens), kind.blocks_of(num_tokens)
            blocks += table[first:stop]
            num_named = min(num_tokens // kind.block_tokens, len(known))
            names += [known[i] if i < num_named else None for i in range(first, stop)]
        if not self._tier.swap_out(sequence.seq_id, blocks, names, num_tokens):
            return False
        self._release(sequence.seq_id)
        return True

    def save_prefixes(self) -> None:
        """Let a tier that lasts keep what was computed since the last time.

        To be done before a step takes any block: what is found then is what the block holds.
        """
        if self._tier is None or not self._unsaved:
            return
        for block in self._unsaved:
            name = self._pool.name_of(block)
            if name is not None:
                self._tier.keep(block, name)
        self._unsaved.clear()

    def take_moves(self) -> BlockMoves:
        """Return the moves of the step that is committed now."""
        out, in_ = ((), ()) if self._tier is None else self._tier.take_moves()
        moves = BlockMoves(tuple(self._copies), out, in_)
        self._copies.clear()
        return moves

    def landed(self) -> None:
        """Say that the oldest step in flight has a result: what it sealed holds what it should."""
        self._num_open = max(0, self._num_open - 1)
        sealed = self._sealed.pop(0)
        if not self._sealed:
            self._sealed.append({})
        if self._tier is not None and self._tier.saves:
            self._unsaved.update(dict.fromkeys(reversed(sealed)))  # tails are used least

    def lose(self, lost: LostMoves) -> tuple[frozenset[int], list[int]]:
        """Take back what hung on moves of the step in flight that were not done.

        Returns the blocks that may hold anything, those sealed by the step among them, and the swapped
        sequences that have nothing in the tier any more.
        """
        sealed = chain.from_iterable(self._sealed)
        bad = frozenset((*lost.blocks, *sealed)) if lost.blocks else frozenset()
        for block in bad:
            self._pool.unname(block)
        if self._tier is None:
            return bad, []
        hit = self._tier.lose(lost.slots)
        return bad, hit + (self._tier.close() if lost.ends_tier else [])

    def free(self, seq_id: int) -> None:
        """Let go of all that a sequence holds, here and in the tier; one that holds nothing is fine."""
        self._release(seq_id)
        if self._tier is not None:
            self._tier.drop(seq_id)

    def _release(self, seq_id: int) -> None:
        # From the end: the next sequence then gets them from the first on, in order.
        for block in reversed(self._tables.pop(seq_id, [])):
            if block != HOLE:
                self._pool.release(block)
        for _, tables in self._more:
            for block in reversed(tables.pop(seq_id, [])):
                if block != HOLE:
                    self._pool.release(block)

    def check(self) -> None:
        """Assert the pools' invariants, and that each ref count is the number of holding tables."""
        self._pool.check()
        if self._tier is not None:
            self._tier.check()
            assert not self._tables.keys() & set(self._tier.swapped()), "swapped out and here"
            for seq_id in self._tier.swapped():
                swapped = self._tier.table(seq_id)
                assert swapped is not None
                num_slots = sum(kind.num_held(swapped.num_tokens) for kind in self.layout.kinds)
                assert len(swapped.slots) == num_slots, f"sequence {seq_id} has slots too many"
        whole = {seq_id: self._blocks_held(seq_id) for seq_id in self._tables}
        held = Counter(block for blocks in whole.values() for block in blocks)
        for block in range(self.num_blocks):
            assert self._pool.ref_count(block) == held[block], (
                f"block {block} has ref count {self._pool.ref_count(block)}, but {held[block]} "
                "table entries hold it"
            )
        for seq_id, blocks in whole.items():
            assert len(set(blocks)) == len(blocks), f"sequence {seq_id} holds a block twice"

    def check_table(self, sequence: Sequence, end: int) -> None:
        """Assert that a sequence holds, of each kind, all that is needed up to `end`."""
        for kind, table in zip(self.layout.kinds, self.tables(sequence.seq_id), strict=True):
            assert len(table) >= kind.blocks_of(end), "computed tokens without a block"
            needed = table[kind.first_block(sequence.num_computed) :]
            assert HOLE not in needed, "a block that will be read was let go"
            num_holes = table.count(HOLE)
            assert table[:num_holes] == [HOLE] * num_holes, "holes are in front"

    def num_let_go(self, sequence: Sequence) -> list[int]:
        """Return how many blocks of each kind a sequence has let go."""
        return [table.count(HOLE) for table in self.tables(sequence.seq_id)]

    def _blocks_held(self, seq_id: int) -> list[int]:
        return [block for table in self.tables(seq_id) for block in table if block != HOLE]


def _names(sequence: Sequence) -> Iterable[list[bytes]]:
    """Return the names of a sequence's blocks, kind after kind; without names, as many empty lists as asked."""
    return chain([sequence.block_names], sequence.more_names, repeat([]))
