"""Prompt lookup: what is proposed, and when nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from pagemill.errors import ConfigError
from pagemill.speculation.ngram import NGramProposer


def look_up(tokens: list[int], count: int, smallest: int = 2, largest: int = 4) -> list[int]:
    return NGramProposer(smallest, largest).look_up(np.array(tokens, np.int32), count).tolist()


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert look_up([1, 2, 3, 4, 5, 6, 1, 2], 3) == [3, 4, 5]


def test_the_longest_n_gram_wins_over_a_later_shorter_one() -> None:
    assert look_up([7, 1, 2, 8, 9, 1, 2, 5, 7, 1, 2], 2) == [8, 9]


def test_of_equal_matches_the_last_one_counts() -> None:
    assert look_up([1, 2, 8, 0, 1, 2, 9, 0, 0, 1, 2], 1) == [9]


def test_a_repeated_text_is_continued_past_its_end() -> None:
    assert look_up([5, 6, 7, 5, 6, 7], 5) == [5, 6, 7, 5, 6]


def test_a_match_shorter_than_the_smallest_n_gram_proposes_nothing() -> None:
    assert look_up([1, 2, 3, 9, 2], 3) == []
    assert look_up([1, 2, 3, 9, 2], 3, smallest=1) == [3, 9, 2]


@pytest.mark.parametrize("tokens", [[], [3], [3, 4, 5]])
def test_a_text_without_repetition_proposes_nothing(tokens: list[int]) -> None:
    assert look_up(tokens, 4, smallest=1) == []


def test_a_smallest_n_gram_over_the_largest_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min 4 and prompt_lookup_max 3; lower"):
        NGramProposer.check({"prompt_lookup_min": 4, "prompt_lookup_max": 3})
