"""The blocks of one pool: reference counts, the free list, and the index of contents.

Knows nothing of sequences. Each block is in one of three states, and free + used + cached = total:

    used    at least one table holds it (ref count > 0)
    free    nobody holds it and its contents are worth nothing
    cached  nobody holds it, but the index can still find its contents

    allocate: free -> used          release by the last holder: used -> cached (in the index) or free
    claim:    cached -> used        allocate, none free: the cached block unused for longest is taken
                                    out of the index -> used

A cached block is allocatable like a free one. `seal` puts a block into the index, under the name of its
contents; names are made by `prefix_cache`. Of two blocks with one name the first stays in the index.
Owned by the block manager.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        # A stack, lowest number on top: what was freed last is warm in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused for longest first
        self._index: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # of the blocks in the index

    @property
    def num_blocks(self) -> int:
        """Return the size of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Return how many blocks nobody holds and nobody can find."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return how many blocks nobody holds but the index finds."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Return how many blocks somebody holds."""
        return self.num_blocks - self.num_free - self.num_cached

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        return self._ref_counts[block]

    def find(self, name: bytes) -> int | None:
        """Return the block with these contents, used or cached, or None."""
        return self._index.get(name)

    # ------------------------------------------------------------ change

    def allocate(self) -> int:
        """Return a block whose contents are worth nothing any more, now held once.

        The plan made sure that there is one.
        """
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "the plan promised a block"
            block, _ = self._cached.popitem(last=False)
            del self._index[self._names.pop(block)]
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more holder of a used block."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use"
        self._ref_counts[block] += 1

    def claim(self, block: int) -> None:
        """Count one more holder of a block that `find` gave."""
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less; after the last one the block is cached or free."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use"
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if block in self._names:
            self._cached[block] = None
        else:
            self._free.append(block)

    def seal(self, block: int, name: bytes) -> None:
        """Say what a used block holds (or will, when the step in flight ends): it can be found now."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use"
        if name not in self._index:
            assert block not in self._names, f"block {block} is sealed already, as something else"
            self._index[name] = block
            self._names[block] = name

    def forget(self) -> None:
        """Empty the index: cached blocks are free, used ones go on and are not found again."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._names.clear()

    def check(self) -> None:
        """Assert that the states add up: free + used + cached = total, and that the index agrees."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is on the free list twice"
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert min(self._ref_counts) >= 0, "a ref count is negative"
        assert not free & used, f"blocks {sorted(free & used)} are both free and used"
        assert not free & cached, f"blocks {sorted(free & cached)} are both free and cached"
        assert not used & cached, f"blocks {sorted(used & cached)} are both used and cached"
        assert len(free) + len(used) + len(cached) == self.num_blocks, (
            f"{len(free)} free + {len(used)} used + {len(cached)} cached blocks are not "
            f"{self.num_blocks}"
        )
        assert cached <= self._names.keys(), "a cached block cannot be found"
        assert not free & self._names.keys(), "a free block can be found"
        assert {name: block for block, name in self._names.items()} == self._index, (
            "the index and the blocks' names differ"
        )
