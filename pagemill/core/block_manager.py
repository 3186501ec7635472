"""Block tables: which block holds which positions of which sequence.

Position p of a sequence lies in block `table[p // block_size]`, slot `p % block_size`. Samples of one
request share the blocks of their prompt through ref counts. Nobody writes into a block that another
table holds: the writer gets a block of its own first, and the contents are copied (copy-on-write).

A step's full blocks are sealed when the step is committed: they can be found by whoever is planned after,
in the same step too, since every layer writes a step's keys and values before it reads any.

What a swapped sequence held, and what was evicted, may be in the host tier: it comes back into blocks of the
device pool, as part of the prefix that a sequence begins with.

Owned by the scheduler. The planner reads it through `BlockView` and counts what a step would cost;
`extend` then commits and cannot run out, because a commit never costs more than its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagemill.core.block_pool import BlockPool
from pagemill.core.host_tier import HostTier, SwappedTable
from pagemill.core.prefix_cache import HostSlot, PrefixHits, extend_names
from pagemill.core.sequence import Sequence
from pagemill.messages import BlockMoves, LostMoves
from pagemill.step_dataclass import step_dataclass


@step_dataclass(frozen=True, slots=True)
class TableChange:
    """What `extend` did: `table[start : start + len(block_ids)] = block_ids`, after `copies`."""

    start: int
    block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]  # (from, to)


class BlockManager:
    """The tables of all sequences over one pool. `caches_prefixes`: full blocks are found again."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caches_prefixes: bool = False,
        tier: HostTier | None = None,
    ) -> None:
        self.block_size = block_size
        self._caches_prefixes = caches_prefixes
        self._pool = BlockPool(num_blocks)
        self._tier = tier
        self._tables: dict[int, list[int]] = {}
        self._copies: list[tuple[int, int]] = []  # of the step that is being committed
        self._sealed: dict[int, None] = {}  # by that step, or by the one in flight
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

    def name_blocks(self, sequence: Sequence) -> None:
        """Name what the sequence's known tokens fill, so that plans can look it up."""
        num_full = sequence.num_tokens // self.block_size
        if self._caches_prefixes and num_full > len(sequence.block_names):
            extend_names(sequence, self.block_size, num_full)

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
        names = sequence.block_names
        table: list[int] = []
        for index, block in enumerate(hits.blocks):
            name = (
                names[index] if (index + 1) * self.block_size <= hits.num_tokens and names else None
            )
            if isinstance(block, HostSlot):
                table.append(self._bring_back(block.slot, name))
                continue
            if block is None:
                assert name is not None
                block = self._pool.find(name)
                assert block is not None, "the plan promised that the step seals this block"
                self._pool.claim(block)
            table.append(block)
        self._tables[sequence.seq_id] = table
        if self._tier is not None:
            self._tier.drop(sequence.seq_id, after_step=True)

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
        self._sealed[block] = None

    def seal(self, sequence: Sequence, num_computed: int, num_tokens: int) -> None:
        """Let the blocks be found that positions [num_computed, num_tokens) fill up."""
        if num_computed // self.block_size == num_tokens // self.block_size:
            return
        table, names = self._tables[sequence.seq_id], sequence.block_names
        stop = min(num_tokens // self.block_size, len(names))
        for index in range(num_computed // self.block_size, stop):
            self._seal(table[index], names[index])

    def forget_prefixes(self) -> None:
        """Let nothing be found that is held now or was."""
        self._pool.forget()
        if self._tier is not None:
            self._tier.forget()

    def extend(self, seq_id: int, num_computed: int, num_tokens: int) -> TableChange:
        """Make positions [num_computed, num_tokens) writable: new blocks, and own ones for shared.

        A copy's source stays held by another table, and victims were freed before the first `extend`
        of a step: so within a step no source is a target as well, and the order of copies does not
        matter. The other holder may write into the source in the same step: copies are done before.
        """
        table = self._tables.setdefault(seq_id, [])
        num_held = len(table)
        num_needed = -(-num_tokens // self.block_size)
        first = num_computed // self.block_size
        if first == num_needed - 1 == num_held - 1 and self._pool.ref_count(table[first]) == 1:
            return TableChange(num_held, (), ())  # nearly every decode
        start = num_held
        copies = []
        for index in range(first, min(num_held, num_needed)):
            shared = table[index]
            if self._pool.ref_count(shared) == 1:
                continue
            own = self._take()
            if index * self.block_size < num_computed:  # else it holds nothing yet
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
        table = self._tables[seq_id]
        for _ in range(len(table) - -(-num_tokens // self.block_size)):
            self._pool.release(table.pop())

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence the blocks of another, shared."""
        assert child_id not in self._tables, f"sequence {child_id} holds blocks already"
        table = list(self._tables[parent_id])
        for block in table:
            self._pool.share(block)
        self._tables[child_id] = table

    def swap_out(self, sequence: Sequence) -> bool:
        """Move what a sequence computed to the host tier, if that pays and fits; its blocks are let go.

        Blocks that others hold too stay where they are for them.
        """
        table = self._tables.get(sequence.seq_id, [])
        if self._tier is None or not self._tier.swap_out(
            sequence.seq_id, table, sequence.block_names, sequence.num_computed
        ):
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
        out, in_, forgets = ((), (), False) if self._tier is None else self._tier.take_moves()
        moves = BlockMoves(tuple(self._copies), out, in_, forgets)
        self._copies.clear()
        return moves

    def landed(self) -> None:
        """Say that the step in flight has a result: what it sealed holds what it should."""
        if self._tier is not None and self._tier.saves:
            self._unsaved.update(dict.fromkeys(reversed(self._sealed)))  # tails are used least
        self._sealed.clear()

    def lose(self, lost: LostMoves) -> tuple[frozenset[int], list[int]]:
        """Take back what hung on moves of the step in flight that were not done.

        Returns the blocks that may hold anything, those sealed by the step among them, and the swapped
        sequences that have nothing in the tier any more.
        """
        bad = frozenset((*lost.blocks, *self._sealed)) if lost.blocks else frozenset()
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
            self._pool.release(block)

    def check(self) -> None:
        """Assert the pools' invariants, and that each ref count is the number of holding tables."""
        self._pool.check()
        if self._tier is not None:
            self._tier.check()
            assert not self._tables.keys() & set(self._tier.swapped()), "swapped out and here"
        held = Counter(block for table in self._tables.values() for block in table)
        for block in range(self.num_blocks):
            assert self._pool.ref_count(block) == held[block], (
                f"block {block} has ref count {self._pool.ref_count(block)}, but {held[block]} "
                "table entries hold it"
            )
        for seq_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"sequence {seq_id} holds a block twice"
