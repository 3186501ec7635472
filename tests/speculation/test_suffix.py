"""Suffix look-up: past outputs in bounded memory, and which continuation is proposed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.batch.request_table import RequestTable
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence, SchedulerOutput
from pagemill.speculation.matching import narrow
from pagemill.speculation.past_outputs import NOBODY, PastOutputs, owner_of
from pagemill.speculation.suffix import SuffixProposer


def ints(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def make(capacity: int = 1024, least: float = 0.1, factor: float = 4.0) -> SuffixProposer:
    return SuffixProposer(capacity, depth=8, factor=factor, least=least)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12),
    st.lists(st.integers(0, 3), min_size=2, max_size=6),
    st.sampled_from([16, 40, 64]),
)
def test_places_are_those_that_a_plain_search_finds_in_what_is_kept(
    texts: list[list[int]], suffix: list[int], capacity: int
) -> None:
    past = PastOutputs(capacity)
    whole: list[int] = []
    for text in texts:
        past.add(ints(text))
        whole += [*text[-(capacity - 1) :], -1]
    oldest = max(0, len(whole) - capacity)
    pairs = [
        p for p in range(oldest + 1, len(whole)) if whole[p - 1 : p + 1] == suffix[-2:]
    ]  # fmt: skip
    found = past.places_of(ints(suffix))
    assert found.tolist() == pairs[-64:]
    ends, size = narrow(past.tokens, found, ints(suffix), 2, len(suffix))
    for end in ends.tolist():
        if end - size >= oldest:  # what is older was written over
            assert whole[end - size + 1 : end + 1] == suffix[-size:]


def test_memory_does_not_grow_with_what_is_said() -> None:
    past = PastOutputs(1000)
    before = past.size_bytes
    for number in range(300):
        past.add(np.arange(50, dtype=np.int32) + number)
    assert past.size_bytes == before <= 40 * 1000
    assert past.places_of(ints([310, 311])).size > 0
    assert past.places_of(ints([3, 4])).size == 0  # the oldest are gone


def test_what_most_often_followed_in_past_outputs_is_proposed() -> None:
    proposer = make()
    for text in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 6], [9, 3, 8, 8, 8]):
        proposer.past.add(ints(text))
    assert proposer.look_up(ints([7, 1, 2, 3]), 8).tolist() == [4, 6]


def test_of_equally_frequent_continuations_the_newest_is_proposed() -> None:
    proposer = make()
    for text in ([1, 2, 5], [1, 2, 4], [1, 2, 6]):
        proposer.past.add(ints(text))
    assert proposer.look_up(ints([1, 2]), 1).tolist() == [6]


def test_a_continuation_ends_where_it_is_unlikely() -> None:
    proposer = make(least=0.5)
    for last in (1, 2, 3):
        proposer.past.add(ints([11, 12, 13, 20 + last]))
    assert proposer.look_up(ints([11, 12]), 8).tolist() == [13]


def test_a_draft_is_at_most_a_multiple_of_what_matched() -> None:
    proposer = make(factor=1.0)
    proposer.past.add(np.arange(40, dtype=np.int32))
    assert proposer.look_up(ints([99, 5, 6]), 24).tolist() == [7, 8]
    assert proposer.look_up(ints([3, 4, 5, 6]), 24).tolist() == [7, 8, 9, 10]


def test_the_sequence_itself_is_searched_too() -> None:
    assert make().look_up(ints([4, 5, 6, 7, 4, 5]), 4).tolist() == [6, 7, 4, 5]


def test_a_text_that_nothing_is_known_of_gets_no_draft() -> None:
    for tokens in ([], [1], [1, 2, 3]):
        assert make().look_up(ints(tokens), 4).tolist() == []


def test_rows_that_end_are_remembered_with_the_end_of_their_prompt() -> None:
    table = RequestTable()
    table.add(
        [
            NewSequence(3, "r", (*range(100, 120), 1, 2, 3), 20, 0, SamplingSpec()),
            NewSequence(4, "s", (50, 51, 52), 3, 0, SamplingSpec()),  # said nothing yet
        ]
    )
    proposer = make()
    proposer.end_rows(table, [3, 4, 77])
    assert proposer.past.tokens[: proposer.past.stop].tolist() == [*range(112, 120), 1, 2, 3, -1]
    assert proposer.look_up(ints([118, 119]), 8).tolist() == [1, 2, 3]


def test_what_was_said_under_one_salt_is_proposed_under_no_other() -> None:
    owners = [NOBODY, owner_of("a"), owner_of("b")]
    for teller in owners:
        proposer = make()
        proposer.past.add(ints([11, 12, 13, 14]), teller)
        for asker in owners:
            draft = list(proposer.look_up(ints([9, 11, 12]), 2, asker))
            assert draft == ([13, 14] if asker == teller else [])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=10)), max_size=12),
    st.lists(st.integers(0, 3), min_size=2, max_size=6),
)
def test_an_owner_finds_what_it_would_find_alone(
    said: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    together = make()
    for owner, text in said:
        together.past.add(ints(text), owner)
    for owner in range(3):
        alone = make()
        for one, text in said:
            if one == owner:
                alone.past.add(ints(text))
        drafted = together.look_up(ints(asked), 4, owner)
        assert drafted.tolist() == alone.look_up(ints(asked), 4).tolist()


def test_rows_are_remembered_and_asked_under_their_own_salt() -> None:
    proposer, table = make(), RequestTable()

    def begin(seq_id: int, tokens: tuple[int, ...], salt: str | None) -> None:
        new = NewSequence(seq_id, "r", tokens, 1, 0, SamplingSpec(), salt)
        table.add([new])
        proposer.begin_step(table, SchedulerOutput(step_id=0, scheduled=(), new_sequences=(new,)))

    begin(1, (9, 11, 12, 13, 14), "one")
    proposer.end_rows(table, [1])
    table.remove([1])
    for seq_id, (salt, expected) in enumerate(
        [("one", [13, 14]), ("two", []), (None, []), ("one", [13, 14])], start=2
    ):
        begin(seq_id, (8, 11, 12), salt)
        part = ScheduledSequence(seq_id, 2, 1, 0, (), num_samples=1, num_drafts=2)
        (draft,) = proposer.propose(table, [part])
        assert draft.tolist() == expected
