"""What was said before, in bounded memory, and where in it the end of a text occurs.

The newest tokens of ended sequences stand in a ring, with a separator behind each sequence. Every token has
a link to the place before it where the same two tokens ended, as in the hash chains of Deflate (RFC 1951,
section 4): following the links gives the newest places first, and links that lead out of the ring end the
walk, so nothing has to be taken out. A token is found by its owner only, a number that is made from a salt.
Owned by the suffix proposer.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from pagemill.speculation.matching import Places, Tokens

SEPARATOR = -1
NOBODY = 0  # the owner of what was said without a salt
_MOST_PLACES = 64  # looked at for one text, the newest
_MULTIPLIER = np.uint64(
    0x9E3779B97F4A7C15
)  # 2**64 over the golden ratio (D. E. Knuth, vol. 3, 6.4)


def owner_of(salt: str) -> int:
    """Return the owner for a salt, from 1 to 2**63 - 1: two salts are not one owner in any lifetime."""
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


class PastOutputs:
    """A ring of tokens with an index of pairs. Places are counted from the first token ever added."""

    def __init__(self, capacity: int) -> None:
        self.tokens: Tokens = np.zeros(capacity, np.int32)
        self._owners: Places = np.zeros(capacity, np.int64)
        self.stop = 0  # the place behind the newest token
        self._links: Places = np.zeros(capacity, np.int64)  # place + 1 of the pair before; 0: none
        self._bits = max(1, (capacity - 1).bit_length())
        self._heads: Places = np.zeros(
            1 << self._bits, np.int64
        )  # newest place + 1, by hash of a pair

    @property
    def size_bytes(self) -> int:
        """Return the memory, full or empty."""
        arrays = (self.tokens, self._owners, self._links, self._heads)
        return sum(array.nbytes for array in arrays)

    def add(self, text: Tokens, owner: int = NOBODY) -> None:
        """Append a sequence's tokens; of one longer than the ring the last ones."""
        capacity = len(self.tokens)
        text = np.append(text[-(capacity - 1) :], np.int32(SEPARATOR))
        places = np.arange(self.stop, self.stop + len(text))
        self.tokens[places % capacity] = text
        self._owners[places % capacity] = owner
        self._links[places % capacity] = 0
        self.stop += len(text)
        if len(text) > 2:
            self._link(self._hashes(text[:-2], text[1:-1], owner), places[1:-1])

    def places_of(self, suffix: Tokens, owner: int = NOBODY) -> Places:
        """Return the newest places of an owner's where the last two tokens of `suffix` end, rising."""
        if len(suffix) < 2 or not self.stop:
            return np.empty(0, np.int64)
        capacity = len(self.tokens)
        oldest = max(0, self.stop - capacity)
        found: list[int] = []
        place = int(self._heads[int(self._hashes(suffix[-2:-1], suffix[-1:], owner)[0])]) - 1
        while place > oldest and len(found) < _MOST_PLACES:
            found.append(place)
            place = int(self._links[place % capacity]) - 1
        places = np.array(found[::-1], np.int64)
        same = (
            (self.tokens[(places - 1) % capacity] == suffix[-2])
            & (self.tokens[places % capacity] == suffix[-1])
            & (self._owners[places % capacity] == owner)
        )
        kept: Places = places[same]
        return kept

    def _link(self, hashes: Places, places: Places) -> None:
        """Link each place to the one before it with the same hash, and make the last ones heads."""
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], places[order]
        is_first = np.append(True, hashes[1:] != hashes[:-1])
        before = np.append(0, places[:-1] + 1)
        before[is_first] = self._heads[hashes[is_first]]
        self._links[places % len(self.tokens)] = before
        is_last = np.append(is_first[1:], True)
        self._heads[hashes[is_last]] = places[is_last] + 1

    def _hashes(self, first: Tokens, second: Tokens, owner: int) -> Places:
        # The owner is hashed in, so that what others said makes nobody's chain longer.
        pairs = first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint64)
        pairs ^= np.uint64(owner)
        hashes: Places = (pairs * _MULTIPLIER >> np.uint64(64 - self._bits)).astype(np.int64)
        return hashes
