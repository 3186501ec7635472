"""The rules of beam search, on made-up distributions, against an exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.beam_search import Beam, BeamSearch
from pagemill.messages import BeamSpec, TokenScores

VOCAB = 7
EOS = 0


def logprobs(tokens: tuple[int, ...], seed: int) -> list[float]:
    """Return a distribution that hangs on all tokens before it."""
    draw = random.Random(f"{seed}{tokens}")
    weights = [draw.random() + 0.01 for _ in range(VOCAB)]
    return [math.log(w / sum(weights)) for w in weights]


def search(spec: BeamSpec, limit: int, seed: int) -> list[Beam]:
    """Run a search to its end."""
    state = BeamSearch(spec, limit=limit, eos_token_ids=frozenset({EOS}), stop_ids=frozenset())
    for _ in range(limit):
        for index, beam in reversed(list(enumerate(state.running))):
            row = logprobs(beam.token_ids, seed)
            ids = sorted(range(VOCAB), key=lambda i: -row[i])[: spec.num_candidates]
            state.note(
                index, TokenScores(ids[0], row[ids[0]], 1, tuple(ids), tuple(row[i] for i in ids))
            )
        assert state.has_all
        if not state.advance():
            return state.best()
    raise AssertionError("beams longer than the limit")


def every_sequence(limit: int, seed: int) -> dict[tuple[int, ...], float]:
    """Return the log probability of each sequence that ends with EOS or at the limit."""
    found = {}
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == EOS or length == limit
            if not ends or EOS in tokens[:-1]:
                continue
            found[tokens] = sum(logprobs(tokens[:i], seed)[t] for i, t in enumerate(tokens))
    return found


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]))
def test_beams_as_many_as_sequences_find_the_best_of_all(seed: int, penalty: float) -> None:
    limit = 3
    found = every_sequence(limit, seed)
    width = VOCAB**limit
    best = search(BeamSpec(width, 2 * width, penalty, "never"), limit, seed)
    scores = {tokens: total / len(tokens) ** penalty for tokens, total in found.items()}
    assert set(found) == {beam.token_ids for beam in best}
    assert best[0].token_ids == max(scores, key=lambda tokens: scores[tokens])
    ranked = [scores[beam.token_ids] for beam in best]
    assert ranked == sorted(ranked, reverse=True)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([True, False, "never"]),
)
def test_a_beam_says_what_its_tokens_cost_and_why_it_ended(
    seed: int, width: int, limit: int, early: bool | str
) -> None:
    for beam in search(BeamSpec(width, 2 * width, 1.0, early), limit, seed):
        costs = [logprobs(beam.token_ids[:i], seed)[t] for i, t in enumerate(beam.token_ids)]
        assert [s.logprob for s in beam.scores] == costs
        assert beam.cumulative == pytest.approx(sum(costs))
        assert EOS not in beam.token_ids[:-1]
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS else "length")
        assert (len(beam.token_ids) == limit) or beam.finish_reason == "stop"


def test_one_beam_is_the_greedy_choice() -> None:
    (beam,) = search(BeamSpec(1, 2, 0.0, True), 6, 3)
    greedy: tuple[int, ...] = ()
    while len(greedy) < 6 and EOS not in greedy:
        row = logprobs(greedy, 3)
        greedy = (*greedy, max(range(VOCAB), key=lambda i: row[i]))
    assert beam.token_ids == greedy


def test_early_stopping_ends_with_the_first_full_set_and_never_goes_on_while_length_may_help() -> (
    None
):
    def rounds(early: bool | str, penalty: float) -> int:
        state = BeamSearch(
            BeamSpec(1, 2, penalty, early),
            limit=50,
            eos_token_ids=frozenset({EOS}),
            stop_ids=frozenset(),
        )
        for count in itertools.count(1):
            # EOS is always likeliest, so the one complete beam is there at once.
            state.note(0, TokenScores(EOS, -0.5, 1, (EOS, 1), (-0.5, -1.0)))
            if not state.advance():
                return count
        raise AssertionError

    assert rounds(True, 1.0) == 1
    assert rounds(False, 1.0) == 1  # -1.0 at length 1 is worse than -0.5
    assert rounds("never", 2.0) > 5  # at length 50 it would count far less
