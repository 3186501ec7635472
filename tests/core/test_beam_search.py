"""The rules of beam search, on made-up distributions, against an exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.beam_search import Beam, BeamSearch, BeamText
from pagemill.messages import BeamSpec, TokenScores

VOCAB = 7
EOS = 0


def spec(width: int, penalty: float, early: bool | str, num_logprobs: int = 0) -> BeamSpec:
    return BeamSpec(
        width=width,
        num_candidates=2 * width,
        num_logprobs=num_logprobs,
        length_penalty=penalty,
        early_stopping=early,
    )


def logprobs(tokens: tuple[int, ...], seed: int) -> list[float]:
    """Return a distribution that hangs on all tokens before it."""
    draw = random.Random(f"{seed}{tokens}")
    weights = [draw.random() + 0.01 for _ in range(VOCAB)]
    return [math.log(w / sum(weights)) for w in weights]


def search(spec: BeamSpec, limit: int, seed: int, text: BeamText | None = None) -> list[Beam]:
    """Run a search to its end."""
    state = BeamSearch(
        spec, limit=limit, eos_token_ids=frozenset({EOS}), stop_ids=frozenset(), text=text
    )
    num_wanted = max(spec.num_candidates, spec.num_logprobs)
    for _ in range(limit):
        for index, beam in reversed(list(enumerate(state.running))):
            row = logprobs(beam.token_ids, seed)
            ids = sorted(range(VOCAB), key=lambda i: -row[i])[:num_wanted]
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
    best = search(spec(width, penalty, "never"), limit, seed)
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
    for beam in search(spec(width, 1.0, early), limit, seed):
        costs = [logprobs(beam.token_ids[:i], seed)[t] for i, t in enumerate(beam.token_ids)]
        assert [s.logprob for s in beam.scores] == costs
        assert beam.cumulative == pytest.approx(sum(costs))
        assert EOS not in beam.token_ids[:-1]
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS else "length")
        assert (len(beam.token_ids) == limit) or beam.finish_reason == "stop"


def test_one_beam_is_the_greedy_choice() -> None:
    (beam,) = search(spec(1, 0.0, True), 6, 3)
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
            spec(1, penalty, early),
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


@pytest.mark.parametrize("num_logprobs", [0, 1, 4, VOCAB])
def test_as_many_alternatives_are_told_as_are_wanted_and_the_beams_are_the_same(
    num_logprobs: int,
) -> None:
    plain = search(spec(2, 1.0, False), 5, 8)
    told = search(spec(2, 1.0, False, num_logprobs), 5, 8)
    assert [b.token_ids for b in told] == [b.token_ids for b in plain]
    for beam in told:
        for i, scores in enumerate(beam.scores):
            row = logprobs(beam.token_ids[:i], 8)
            likeliest = sorted(row, reverse=True)[:num_logprobs]
            assert list(scores.top_logprobs) == likeliest
            assert [row[token] for token in scores.top_ids] == likeliest
            assert scores.logprob == row[scores.token_id]
            assert scores.rank == 1 + sum(value > scores.logprob for value in row)


class Digits:
    """A text of digits, in which "12" and "3" are stops."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def copy(self) -> Digits:
        return Digits(self.text)

    def push(self, token_id: int, num_tokens: int) -> str | None:
        self.text += str(token_id)
        assert len(self.text) == num_tokens
        return next((stop for stop in ("12", "3") if self.text.endswith(stop)), None)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5))
def test_a_stop_string_ends_a_beam_where_its_last_token_completes_it(
    seed: int, width: int, limit: int
) -> None:
    beams = search(spec(width, 1.0, "never"), limit, seed, Digits())
    assert len(beams) == width
    for beam in beams:
        text = "".join(map(str, beam.token_ids))
        assert "12" not in text[:-1] and "3" not in text[:-1]
        if text.endswith(("12", "3")):
            assert (beam.finish_reason, beam.stop_reason) == ("stop", text[-1:].replace("2", "12"))
        else:
            assert beam.stop_reason is None
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS else "length")


def test_where_every_candidate_stops_the_best_of_them_are_the_answer() -> None:
    class Anything(Digits):
        def copy(self) -> Digits:
            return Anything(self.text)

        def push(self, token_id: int, num_tokens: int) -> str | None:
            return str(token_id)

    beams = search(spec(3, 1.0, False), 5, 2, Anything())
    row = logprobs((), 2)
    best = sorted(range(VOCAB), key=lambda i: -row[i])[:3]
    assert [beam.token_ids for beam in beams] == [(token,) for token in best]
