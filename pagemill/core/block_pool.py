"""The blocks of one pool: reference counts and the free list. Knows nothing of sequences.

Each block is in one of three states, and free + used + cached = total:

    used    at least one table holds it (ref count > 0)
    free    nobody holds it and its contents are worth nothing
    cached  nobody holds it, but a hash index can still find its contents

A cached block is allocatable like a free one: a hit claims it (cached -> used), and an allocation that
finds no free block takes the one unused for longest and drops it from the index. There is no hash index in
this version, so no block is cached. It would be a dictionary in this file, from chained content hash to
block, filled when a block is sealed; `release` would then send an indexed block to the cached state.

Owned by the block manager.
"""

from __future__ import annotations


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        # A stack, lowest number on top: what was freed last is warm in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Return the size of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Return how many blocks nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return how many blocks nobody holds but the hash index finds: none without an index."""
        return 0

    @property
    def num_used(self) -> int:
        """Return how many blocks somebody holds."""
        return self.num_blocks - self.num_free - self.num_cached

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Return a free block, now held once. The plan made sure that there is one."""
        assert self._free, "the plan promised a free block"
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more holder of a used block."""
        assert self._ref_counts[block] > 0, f"block {block} is free"
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less; the last one frees the block."""
        assert self._ref_counts[block] > 0, f"block {block} is free"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def check(self) -> None:
        """Assert that the states add up: free + used + cached = total, each free block listed once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert min(self._ref_counts) >= 0, "a ref count is negative"
        assert not free & used, f"blocks {sorted(free & used)} are both free and used"
        assert len(free) + len(used) + self.num_cached == self.num_blocks, (
            f"{len(free)} free + {len(used)} used + {self.num_cached} cached blocks are not "
            f"{self.num_blocks}"
        )
