"""Which samples stand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.messages import TokenScores
from pagemill.sampling.sampler import SampledRow
from pagemill.speculation.rejection import accept


def row(token: int) -> SampledRow:
    return SampledRow((token,), (TokenScores(token, -float(token), 1),))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_samples_stand_up_to_the_first_that_the_draft_did_not_have(
    drafts: list[int], data: st.DataObject
) -> None:
    size = len(drafts) + 1
    samples = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    run = accept(drafts, [row(token) for token in samples])
    wrong = [i for i, token in enumerate(drafts) if samples[i] != token]
    expected = samples[: wrong[0] + 1] if wrong else samples
    assert list(run.tokens) == expected
    assert [score.token_id for score in run.scores] == expected


def test_the_first_row_s_error_is_the_sequence_s() -> None:
    run = accept([4], [SampledRow(error="not finite"), row(5)])
    assert (run.tokens, run.error) == ((), "not finite")


def test_a_later_row_s_error_ends_the_run_before_it() -> None:
    run = accept([4, 5], [row(4), SampledRow(error="not finite"), row(6)])
    assert (run.tokens, run.error) == ((4,), None)


def test_an_error_behind_a_rejected_draft_is_nobody_s() -> None:
    run = accept([4, 5], [row(3), SampledRow(error="not finite"), row(6)])
    assert (run.tokens, run.error) == ((3,), None)
