"""Names of block contents: chained hashes, so that equal prefixes are found again.

A full block is named by its parent's name (the block before it), and its own token ids. The first block's
parent is the root, which names everything else that the keys and values depend on: labelled extra keys,
such as a `cache_salt`. So two blocks have one name only if all tokens up to their ends and all extra keys
are equal, and labels keep keys of different kinds apart.

Names are 128 bits of BLAKE2b (RFC 7693): nobody can make two prefixes that share one, by chance or on
purpose, and they are the same in every process. Called by the block manager.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from pagemill.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class HostSlot:
    """Where the host tier has a block's contents."""

    slot: int


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """What a sequence without blocks may begin with: its first blocks, in order.

    A block of the device pool, a slot of the host tier, or None for one that an earlier share of the step
    fills. The last one is full, unless the sequence comes back from the host tier. Of several kinds of
    layers the blocks stand one kind behind the other, and of a window's those that position `num_tokens` sees.
    """

    blocks: tuple[int | HostSlot | None, ...] = ()
    num_tokens: int = 0

    def __bool__(self) -> bool:
        return self.num_tokens > 0  # a window of one token may need none of its blocks

    @property
    def num_host(self) -> int:
        """Return how many have to be copied in, each into a block of its own."""
        return sum(isinstance(block, HostSlot) for block in self.blocks)


NO_HITS = PrefixHits()
_NAME_BYTES = 16


def root_name(extra_keys: Iterable[tuple[str, str]]) -> bytes:
    """Return the parent of first blocks under these (label, value) pairs, in this order."""
    digest = blake2b(digest_size=_NAME_BYTES, person=b"pagemill-root")
    for pair in extra_keys:
        for part in pair:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def extend_names(
    sequence: Sequence, block_size: int, num_blocks: int, kind: int | None = None
) -> None:
    """Name the sequence's first `num_blocks` blocks, which its known tokens fill.

    What is named already stays: tokens are only ever appended. `kind` numbers further kinds of layers, whose
    names are chains of their own: their blocks hold the same tokens and something else.
    """
    names = sequence.block_names if kind is None else sequence.more_names[kind]
    start = len(names)
    if start >= num_blocks:
        return
    assert num_blocks * block_size <= sequence.num_tokens, "only full blocks have a name"
    parent = names[-1] if names else _root(sequence, kind)
    tokens = array("q", sequence.tokens(start * block_size, num_blocks * block_size)).tobytes()
    width = 8 * block_size
    for at in range(0, len(tokens), width):
        digest = blake2b(parent, digest_size=_NAME_BYTES)
        digest.update(tokens[at : at + width])
        parent = digest.digest()
        names.append(parent)


def _root(sequence: Sequence, kind: int | None) -> bytes:
    keys = sequence.group.request.cache_keys
    return root_name(keys if kind is None else (*keys, ("kind of layers", str(kind))))
