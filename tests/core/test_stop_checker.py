"""Token stops in their order; string stops against a brute-force reference over random splits."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagemill.core.stop_checker import StopStringMatcher, TokenStop, check_tokens
from tests.core.fake_ranks import make_request

EOS, OTHER_EOS, STOP = 7, 8, 9


def check(
    tokens: tuple[int, ...],
    *,
    num_output: int = 0,
    max_tokens: int = 10,
    min_tokens: int = 0,
    eos: frozenset[int] = frozenset({EOS, OTHER_EOS}),
    max_model_len: int = 100,
) -> TokenStop:
    request = make_request(
        "r", 4, max_tokens=max_tokens, min_tokens=min_tokens, eos=eos, stop_ids=frozenset({STOP})
    )
    return check_tokens(tokens, num_output, request, max_model_len)


def test_end_token_has_no_stop_reason_and_stop_token_is_its_own() -> None:
    assert check((EOS,)) == TokenStop(1, "stop", None)
    assert check((OTHER_EOS,)) == TokenStop(1, "stop", None)
    assert check((STOP,)) == TokenStop(1, "stop", STOP)
    assert check((1,)) == TokenStop(1)


def test_end_token_that_is_a_stop_token_too_counts_as_end() -> None:
    assert check((STOP,), eos=frozenset({STOP})) == TokenStop(1, "stop", None)


def test_tokens_after_the_stop_are_dropped() -> None:
    assert check((1, 2, STOP, 3, EOS)) == TokenStop(3, "stop", STOP)


def test_nothing_but_length_stops_before_min_tokens() -> None:
    assert check((EOS, STOP, OTHER_EOS, 1), min_tokens=3) == TokenStop(3, "stop", None)
    assert check((EOS,), num_output=1, min_tokens=3) == TokenStop(1)
    assert check((EOS,), num_output=2, min_tokens=3) == TokenStop(1, "stop", None)
    assert check((EOS, EOS), min_tokens=9, max_model_len=6) == TokenStop(2, "length")


def test_max_tokens_and_context_end_with_length() -> None:
    assert check((1, 2, 3), num_output=8) == TokenStop(2, "length")
    assert check((1,), num_output=9) == TokenStop(1, "length")
    assert check((1, 2, 3), max_model_len=6) == TokenStop(2, "length")


def test_stop_token_on_the_last_place_is_a_stop() -> None:
    assert check((STOP,), num_output=9) == TokenStop(1, "stop", STOP)


def test_ignored_end_tokens_do_not_stop() -> None:
    assert check((EOS, OTHER_EOS, 1), eos=frozenset()) == TokenStop(3)


# ---------------------------------------------------------------- strings


def feed(matcher: StopStringMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """Push pieces up to the stop; return what was emitted each time, the flush, and the stop."""
    emitted = []
    for piece in pieces:
        result = matcher.push(piece)
        emitted.append(result.emit)
        if result.stopped is not None:
            return emitted, result.stopped
    emitted.append(matcher.flush())
    return emitted, None


def test_stop_across_many_tokens_is_never_shown() -> None:
    pieces = ["A", "B", "C", "DEF", "G", "HI", "J", "K"]
    emitted, stopped = feed(StopStringMatcher(["DEFGHIJ"], include=False), pieces)
    assert emitted == ["A", "B", "C", "", "", "", ""]
    assert stopped == "DEFGHIJ"


def test_held_text_is_released_as_soon_as_it_cannot_match() -> None:
    matcher = StopStringMatcher(["DEFGHIJ"], include=False)
    assert matcher.push("CDEFG").emit == "C"
    assert matcher.push("HX").emit == "DEFGHX"


def test_held_text_shrinks_to_the_end_that_can_still_match() -> None:
    matcher = StopStringMatcher(["aab"], include=False)
    assert matcher.push("aa").emit == ""
    assert matcher.push("a").emit == "a"
    assert matcher.push("b").stopped == "aab"


def test_stop_inside_a_token_cuts_it() -> None:
    assert feed(StopStringMatcher(["Pari"], include=False), ["in", " Paris"]) == (
        ["in", " "],
        "Pari",
    )


def test_included_stop_is_shown_to_its_end() -> None:
    assert feed(StopStringMatcher(["Pari"], include=True), ["in", " Pa", "ris"]) == (
        ["in", " ", "Pari"],
        "Pari",
    )


def test_hidden_text_stops_and_is_never_shown() -> None:
    for include in (False, True):
        matcher = StopStringMatcher(["<end>", "x<sep>y"], include)
        assert matcher.push("ab").emit == "ab"
        assert matcher.push("<other>", hidden=True).emit == ""
        result = matcher.push("<end>", hidden=True)
        assert (result.emit, result.stopped) == ("", "<end>")
    matcher = StopStringMatcher(["x<sep>y"], include=True)
    assert matcher.push("ax").emit == "a"
    assert matcher.push("<sep>", hidden=True).emit == ""
    result = matcher.push("yz")
    assert (result.emit, result.stopped) == ("xy", "x<sep>y")


def test_hidden_text_that_did_not_stop_stays_hidden() -> None:
    matcher = StopStringMatcher(["<sep>y"], include=False)
    assert matcher.push("<sep>", hidden=True).emit == ""
    assert matcher.push("z").emit == "z"
    assert matcher.push("<sep>", hidden=True).emit == ""
    assert matcher.flush() == ""


def test_text_before_min_tokens_takes_no_part() -> None:
    matcher = StopStringMatcher(["\n", "ab"], include=False)
    assert matcher.push("one\n", may_stop=False).emit == "one\n"
    assert matcher.push("a", may_stop=False).emit == "a"
    assert matcher.push("b").emit == "b"
    assert matcher.push("a").emit == ""
    assert matcher.push("x", may_stop=False).emit == "ax"
    assert matcher.push("b").emit == "b"
    assert matcher.push("two\nthree").stopped == "\n"


def test_of_stops_complete_at_one_character_the_longest_is_taken() -> None:
    assert feed(StopStringMatcher(["b", "ab"], include=False), ["xab"]) == (["x"], "ab")


def test_no_stops_hold_nothing() -> None:
    assert feed(StopStringMatcher([], include=False), ["a", "b"]) == (["a", "b", ""], None)


def test_text_after_the_stop_is_a_programming_error() -> None:
    matcher = StopStringMatcher(["a"], include=False)
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


Piece = tuple[str, bool, bool]  # text, hidden, may_stop


def reference(pieces: list[Piece], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the shown text and the stop, looking at every end and every stop."""
    chars = [(char, hidden, may) for text, hidden, may in pieces for char in text]
    for end in range(1, len(chars) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            span = chars[max(0, end - len(stop)) : end]
            if "".join(c for c, _, _ in span) == stop and all(may for _, _, may in span):
                shown = chars[: end if include else end - len(stop)]
                return "".join(c for c, hidden, _ in shown if not hidden), stop
    return "".join(c for c, hidden, _ in chars if not hidden), None


def still_open(pieces: list[Piece], stops: list[str]) -> int:
    """Return how many characters at the end could still become a stop."""
    chars = [(char, may) for text, _, may in pieces for char in text]
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            span = chars[len(chars) - length :] if length <= len(chars) else []
            if "".join(c for c, _ in span) == stop[:length] and all(may for _, may in span):
                longest = max(longest, length)
    return longest


texts = st.text("ab", max_size=6)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(
        st.tuples(texts, st.booleans(), st.sampled_from([True, True, True, False])), max_size=12
    ),
    stops=stop_lists,
    include=st.booleans(),
)
@example(pieces=[("aabaaab", False, True)], stops=["aabaaac", "aaab"], include=False)
@example(pieces=[("a", False, True), ("", False, False)], stops=["aa"], include=False)
def test_matcher_agrees_with_brute_force_for_every_split(
    pieces: list[Piece], stops: list[str], include: bool
) -> None:
    expected = reference(pieces, stops, include)
    matcher = StopStringMatcher(stops, include)
    shown = ""
    stopped = None
    for index, (text, hidden, may_stop) in enumerate(pieces):
        result = matcher.push(text, hidden=hidden, may_stop=may_stop)
        shown += result.emit
        stopped = result.stopped
        if stopped is not None:
            break
        # Exactly what can still become a stop is held back, no more and no less.
        so_far = pieces[: index + 1]
        chars = [(c, hid) for piece, hid, _ in so_far for c in piece]
        out = chars[: len(chars) - still_open(so_far, stops)]
        assert shown == "".join(c for c, hid in out if not hid)
    if stopped is None:
        shown += matcher.flush()
    assert (shown, stopped) == expected
