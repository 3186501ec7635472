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
The device's blocks are one pool, owned by the block manager; the slots of the host tier are another.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, kept: Sequence[tuple[int, bytes]] = ()) -> None:
        """`kept`: (block, name) of contents from before the pool was made, unused for longest first."""
        self._ref_counts = array("i", [0]) * num_blocks
        # A stack: what was freed last is warm in the processor's caches. Below it, in rising order, are
        # those from `_num_touched` on, which nobody ever had: a tier may have a million.
        self._free: list[int] = []
        self._num_touched = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused for longest first
        self._index: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # of the blocks in the index
        for block, name in kept:
            if name not in self._index:
                self._index[name] = block
                self._names[block] = name
                self._cached[block] = None
        self._num_touched = max(self._cached, default=-1) + 1
        self._free.extend(b for b in range(self._num_touched - 1, -1, -1) if b not in self._cached)

    @property
    def num_blocks(self) -> int:
        """Return the size of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Return how many blocks nobody holds and nobody can find."""
        return len(self._free) + self.num_blocks - self._num_touched

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

    def name_of(self, block: int) -> bytes | None:
        """Return the name under which the block is found, or None."""
        return self._names.get(block)

    # ------------------------------------------------------------ change

    def allocate(self) -> tuple[int, bytes | None]:
        """Return a block, now held once, and the name that its contents had until now, if any.

        The plan made sure that there is one.
        """
        evicted = None
        if self._free:
            block = self._free.pop()
        elif self._num_touched < self.num_blocks:
            block = self._num_touched
            self._num_touched += 1
        else:
            assert self._cached, "the plan promised a block"
            block, _ = self._cached.popitem(last=False)
            evicted = self._names.pop(block)
            del self._index[evicted]
        self._ref_counts[block] = 1
        return block, evicted

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

    def unname(self, block: int) -> None:
        """Let a block not be found: it does not hold what it was said to. Without a name: nothing."""
        name = self._names.pop(block, None)
        if name is None:
            return
        del self._index[name]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

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
        touched = range(self._num_touched)
        used = {block for block in touched if self._ref_counts[block] > 0}
        assert not any(self._ref_counts[b] < 0 for b in touched), "a ref count is negative"
        assert not free & used, f"blocks {sorted(free & used)} are both free and used"
        assert not free & cached, f"blocks {sorted(free & cached)} are both free and cached"
        assert not used & cached, f"blocks {sorted(used & cached)} are both used and cached"
        untouched = self.num_blocks - self._num_touched
        assert free | used | cached == set(touched), (
            f"{len(free) + untouched} free + {len(used)} used + {len(cached)} cached blocks are not "
            f"{self.num_blocks}"
        )
        assert cached <= self._names.keys(), "a cached block cannot be found"
        assert not free & self._names.keys(), "a free block can be found"
        assert {name: block for block, name in self._names.items()} == self._index, (
            "the index and the blocks' names differ"
        )
