"""The second tier: which host slot holds which block's contents. Bookkeeping only, no bytes.

A slot holds what one block of the device held, for one of two reasons:

    a swapped sequence's    held by its table here, until it comes back or ends
    a prefix                found by name, like a cached block: blocks that the device pool evicts, and
                            named ones of swapped sequences; kept until the slot is needed, LRU

The slots are a `BlockPool` of their own; the same rules of sharing hold. The moves of a step are collected
here while it is committed and handed out once, by `take_moves`. The ranks do all moves out, then all moves
in, then copies. So within a step a slot is written at most once, and never if it is read:

- what a step reads is held, by a claim or by a swapped sequence's table, before anything is written;
- what is read for the last time, or written, is given back only when the moves are handed out.

Whether moving pays is decided with costs that were measured at start: bits do not depend on it. Owned by the
block manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.core.block_pool import BlockPool
from pagemill.host_tier_plan import HostTierPlan
from pagemill.messages import SwapIn, SwapOut

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """What a swapped sequence has in the tier: all that it needs to go on after position num_tokens.

    Slot by slot, one kind of layers behind the other, of a window's what it still sees.
    """

    slots: tuple[int, ...]
    num_tokens: int


class HostTier:
    """The slots of one tier. `mode` is one of PREEMPTION_MODES."""

    def __init__(
        self, plan: HostTierPlan, block_size: int, *, mode: str = "auto", num_blocks: float = 1.0
    ) -> None:
        """`num_blocks` is what `block_size` tokens take, where several kinds of layers have tables."""
        assert mode in PREEMPTION_MODES
        self._costs = plan.costs
        self._mode = mode
        self.saves = plan.lasts  # prefixes are to be kept here as soon as they are computed
        self._pool = BlockPool(plan.num_slots, plan.kept)
        self._tables: dict[int, SwappedTable] = {}
        self._is_open = plan.num_slots > 0
        self._out: list[SwapOut] = []
        self._in: list[SwapIn] = []
        # Held until the moves of the step are handed out: read for the last time, and written or used.
        self._given_back: list[int] = []
        self._kept: list[int] = []
        # Coming back must pay, and being written out at all: a prefix is written once and may come often.
        self._keeps_prefixes = self._is_open and (
            mode == "swap"
            or plan.costs.swap_in_s * num_blocks < plan.costs.recompute_s(0, block_size)
        )

    # ------------------------------------------------------------ read

    @property
    def num_swapped(self) -> int:
        """Return how many sequences are swapped out."""
        return len(self._tables)

    @property
    def usage(self) -> float:
        """Return the share of slots that hold something, 0..1."""
        return 1.0 - self._pool.num_free / max(1, self._pool.num_blocks)

    def find(self, name: bytes) -> int | None:
        """Return the slot with these contents, if there is one and copying it back pays."""
        return self._pool.find(name) if self._keeps_prefixes else None

    def table(self, seq_id: int) -> SwappedTable | None:
        """Return what a swapped sequence has here."""
        return self._tables.get(seq_id)

    def swapped(self) -> list[int]:
        """Return the ids of the swapped sequences."""
        return list(self._tables)

    # ------------------------------------------------------------ commit

    def claim(self, slot: int) -> None:
        """Hold a slot that a plan found until this step's moves are handed out."""
        self._pool.claim(slot)
        self._given_back.append(slot)

    def swap_out(
        self, seq_id: int, blocks: Sequence[int], names: Sequence[bytes | None], num_tokens: int
    ) -> bool:
        """Move the blocks of a sequence with so many computed tokens here, if that pays and there is room.

        Full blocks, which have names, are shared and not written again if they are here already; behind the
        end of `names` none has one.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is swapped out already"
        if not self._is_open or self._mode == "recompute" or num_tokens == 0:
            return False
        names = [*names, *[None] * (len(blocks) - len(names))]
        slots = [None if name is None else self._pool.find(name) for name in names]
        num_new = slots.count(None)
        if self._mode == "auto" and not self._swap_pays(num_new, len(blocks), num_tokens):
            return False
        for slot in slots:
            if slot is not None:
                self._pool.claim(slot)
        if num_new > self._pool.num_free + self._pool.num_cached:
            for slot in slots:
                if slot is not None:
                    self._pool.release(slot)
            return False
        table = []
        for block, name, slot in zip(blocks, names, slots, strict=True):
            table.append(self._write(block, name) if slot is None else slot)
        self._tables[seq_id] = SwappedTable(tuple(table), num_tokens)
        return True

    def keep(self, block: int, name: bytes) -> None:
        """Keep the contents of a block, which the device pool may take for something else now."""
        if not self._keeps_prefixes:
            return
        slot = self._pool.find(name)
        if slot is not None:
            self._pool.claim(slot)  # and released: used last
        elif self._pool.num_free + self._pool.num_cached:
            slot = self._write(block, name)
        else:
            return
        self._kept.append(slot)

    def swap_in(self, slot: int, block: int) -> None:
        """Bring a slot's contents into a block of the device pool."""
        self._in.append(SwapIn(slot, block))

    def drop(self, seq_id: int, *, after_step: bool = False) -> None:
        """Let go of what a sequence has here; `after_step`: this step still reads it."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        if after_step:
            self._given_back.extend(table.slots)
            return
        for slot in reversed(table.slots):
            self._pool.release(slot)

    def take_moves(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """Return the moves of the step."""
        moves = tuple(self._out), tuple(self._in)
        for slot in (*self._kept, *reversed(self._given_back)):  # in the order of last use
            self._pool.release(slot)
        self._kept.clear()
        self._out.clear()
        self._in.clear()
        self._given_back.clear()
        return moves

    def forget(self) -> None:
        """Let no prefix be found that is here now; swapped sequences keep theirs.

        A tier that lasts has to be told as well: `StepCommit.forget`.
        """
        self._pool.forget()

    # ------------------------------------------------------------ losses

    def lose(self, slots: Sequence[int]) -> list[int]:
        """Let nothing be found in slots that do not hold what they should.

        Returns the swapped sequences that had some of it in them, which have nothing here any more.
        """
        for slot in slots:
            self._pool.unname(slot)
        bad = set(slots)
        hit = [seq_id for seq_id, table in self._tables.items() if bad & set(table.slots)]
        for seq_id in hit:
            self.drop(seq_id)
        return hit

    def close(self) -> list[int]:
        """Go on without the tier; return the sequences that were swapped out."""
        hit = list(self._tables)
        for seq_id in hit:
            self.drop(seq_id)
        self._pool.forget()
        self._is_open = self._keeps_prefixes = False
        return hit

    def check(self) -> None:
        """Assert that the slots add up, and that tables alone hold them between steps."""
        self._pool.check()
        assert not (self._out or self._in or self._given_back or self._kept), (
            "moves that nobody took"
        )
        held = [slot for table in self._tables.values() for slot in table.slots]
        for slot in set(held):
            assert self._pool.ref_count(slot) == held.count(slot), f"slot {slot} is miscounted"
        assert self._pool.num_used == len(set(held)), "a slot is held by nobody"

    # ------------------------------------------------------------ small parts

    def _write(self, block: int, name: bytes | None) -> int:
        slot, _ = self._pool.allocate()
        self._out.append(SwapOut(block, slot, name))
        if name is not None:
            self._pool.seal(slot, name)
        return slot

    def _swap_pays(self, num_out: int, num_in: int, num_tokens: int) -> bool:
        return self._costs.swap_s(num_out, num_in) < self._costs.recompute_s(0, num_tokens)
