"""Where the end of a text occurs before, and what follows there. Pure array operations, no state.

Called by the proposers that guess from text they have seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Places = NDArray[np.int64]


def narrow(
    tokens: Tokens, ends: Places, suffix: Tokens, size: int, most: int
) -> tuple[Places, int]:
    """Return the places where the longest end of `suffix` ends, and its length.

    `ends` are places (rising) where the last `size` tokens of `suffix` end. One more token before them is
    compared at a time, up to `most`, as long as a place is left. Place p is entry p % len(tokens).
    """
    most = min(most, len(suffix))
    while size < most and len(ends):
        earlier = ends[ends >= size]
        kept = earlier[tokens[(earlier - size) % len(tokens)] == suffix[-size - 1]]
        if not len(kept):
            break
        ends = kept
        size += 1
    return ends, size


def earlier_matches(tokens: Tokens, most: int) -> tuple[Places, int]:
    """Return where else the longest end of `tokens`, of at most `most`, ends; and its length."""
    if not len(tokens):
        return np.empty(0, np.int64), 0
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    return narrow(tokens, ends, tokens, min(1, len(ends)), most)


def copy_from(tokens: Tokens, start: int, count: int) -> Tokens:
    """Return the `count` tokens from `start` on; past the end they go on with the copy itself.

    As in the coding of J. Ziv and A. Lempel (1977), where a match may reach into what it produces.
    """
    period = len(tokens) - start
    assert period > 0
    if count <= period:
        return tokens[start : start + count]
    return np.resize(tokens[start:], count)


def most_frequent(
    tokens: Tokens, ends: Places, stop: int, count: int, least: float
) -> tuple[list[int], float]:
    """Return what most often follows the places, token by token, and the sum of its chances.

    As in walking down a suffix tree: of the tokens that stand behind the places the most frequent one is
    taken (of equal ones the newest), and the places where it stands go on. The chance of a draft is the
    share of the places that its tokens have left; it ends where that falls below `least`, where text ends
    (`stop`, or a negative entry), or after `count` tokens. Place p is entry p % len(tokens).
    """
    draft: list[int] = []
    chance, score = 1.0, 0.0
    places = ends + 1
    while len(draft) < count:
        places = places[places < stop]
        following = tokens[places % len(tokens)]
        places, following = places[following >= 0], following[following >= 0]
        if not len(following):
            break
        # From the newest place on, so that the first of equal counts is the newest.
        found, first, counts = np.unique(following[::-1], return_index=True, return_counts=True)
        best = int(np.lexsort((first, -counts))[0])
        chance *= int(counts[best]) / len(following)
        if chance < least:
            break
        draft.append(int(found[best]))
        score += chance
        places = places[following == found[best]] + 1
    return draft, score
