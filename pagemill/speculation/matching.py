"""Where the end of a text occurs before, and what follows there. Pure array operations, no state.

Called by the proposers that guess from text they have seen.
"""

from __future__ import annotations

from collections import Counter

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


def longest_of(
    tokens: Tokens, ends: Places, suffix: Tokens, size: int, most: int
) -> tuple[Places, int]:
    """Return what `narrow` returns, compared all at once: for few places."""
    most = min(most, len(suffix))
    if size >= most or not len(ends):
        return ends, size
    before = ends[:, None] - np.arange(size, most)
    same = (tokens[before % len(tokens)] == suffix[-size - 1 : -most - 1 : -1]) & (before >= 0)
    more = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    longest = int(more.max())
    return ends[more == longest], size + longest


def most_frequent(
    tokens: Tokens, ends: Places, stop: int, count: int, least: float
) -> tuple[list[int], float]:
    """Return what most often follows the places, token by token, and the sum of its chances.

    As in walking down a suffix tree: of the tokens that stand behind the places the most frequent one is
    taken (of equal ones the newest), and the places where it stands go on. The chance of a draft is the
    share of the places that its tokens have left; it ends where that falls below `least`, where text ends
    (`stop`, or a negative entry), or after `count` tokens. Place p is entry p % len(tokens).
    """
    behind = ends[:, None] + np.arange(1, count + 1)
    texts: list[list[int]] = np.where(behind < stop, tokens[behind % len(tokens)], -1).tolist()
    draft: list[int] = []
    chance, score = 1.0, 0.0
    for place in range(count):
        texts = [text for text in texts if text[place] >= 0]
        if not texts:
            break
        best = texts[-1][place]
        going_on = [text for text in texts if text[place] == best]
        if len(going_on) < len(texts):
            following = [text[place] for text in reversed(texts)]
            best = max(following, key=Counter(following).__getitem__)  # the first of equals
            going_on = [text for text in texts if text[place] == best]
            chance *= len(going_on) / len(texts)
            if chance < least:
                break
        draft.append(best)
        score += chance
        texts = going_on
    return draft, score
