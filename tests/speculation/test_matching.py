"""Where the end of a text occurs before: compared with a plain search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.speculation.matching import copy_from, earlier_matches, longest_of, narrow


def plain(tokens: list[int], most: int) -> tuple[list[int], int]:
    """Return the same by looking at every place."""
    best: tuple[list[int], int] = ([], 0)
    for size in range(1, min(most, len(tokens)) + 1):
        suffix = tokens[-size:]
        ends = [
            e for e in range(size - 1, len(tokens) - 1) if tokens[e - size + 1 : e + 1] == suffix
        ]
        if ends:
            best = (ends, size)
    return best


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 8))
def test_the_longest_earlier_occurrence_is_found_at_all_its_places(
    tokens: list[int], most: int
) -> None:
    ends, size = earlier_matches(np.array(tokens, np.int32), most)
    assert (ends.tolist(), size) == plain(tokens, most)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_comparing_all_at_once_finds_what_comparing_one_by_one_does(
    text: list[int], end: list[int], most: int
) -> None:
    tokens, suffix = np.array(text, np.int32), np.array(end, np.int32)
    ends = np.flatnonzero(tokens == suffix[-1])
    one, two = (f(tokens, ends, suffix, min(1, len(ends)), most) for f in (narrow, longest_of))
    if len(ends):
        assert (one[0].tolist(), one[1]) == (two[0].tolist(), two[1])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_a_copy_that_passes_the_end_goes_on_with_itself(
    tokens: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(0, 30))
    text = list(tokens)
    for i in range(count):
        text.append(text[start + i])
    copied = copy_from(np.array(tokens, np.int32), start, count)
    assert copied.tolist() == text[len(tokens) :]
