"""The work is the same for every engine and new in every round."""

from __future__ import annotations

import pytest

from benchmarks import work


@pytest.mark.parametrize("case", work.CASES)
def test_rounds_keep_lengths_and_change_tokens(case: str) -> None:
    first, again, second = (work.make(case, round) for round in ("0", "0", "1"))
    assert first == again
    assert [(len(job.prompt), job.num_output) for job in first] == [
        (len(job.prompt), job.num_output) for job in second
    ]
    assert all(one.prompt != other.prompt for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("case", work.CASES)
def test_warm_up_shares_no_tokens_with_a_round(case: str) -> None:
    warm_up, jobs = work.make(case, work.WARM_UP), work.make(case, "0")
    assert sum(job.num_output for job in warm_up) <= sum(job.num_output for job in jobs)
    assert warm_up[0].prompt[:8] != jobs[0].prompt[:8]


def test_case_e_shares_a_prefix() -> None:
    prompts = [job.prompt for job in work.make("e", "3")]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 16


def test_decode_rate_leaves_the_first_token_out() -> None:
    jobs = work.make("a", "0")
    figures = work.figures("a", jobs, work.Outcome(wall_s=13.2, num_output=128, ttft_s=0.5))
    assert figures == {"wall_s": 13.2, "ttft_ms": 500.0, "decode_tok_per_s": pytest.approx(10.0)}


def test_an_engine_that_does_not_tell_its_first_token_has_its_wall_time_alone() -> None:
    jobs = work.make("a", "0")
    assert work.figures("a", jobs, work.Outcome(2.0, 128)) == {"wall_s": 2.0}


def test_an_engine_that_stops_early_has_no_figures() -> None:
    jobs = work.make("b", "0")
    with pytest.raises(RuntimeError, match="case b: 2047 tokens were generated instead of 2048"):
        work.figures("b", jobs, work.Outcome(1.0, 2047))
