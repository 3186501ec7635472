"""A target is shown only by a whole spread above it."""

from __future__ import annotations

import pytest

from benchmarks.targets import Ratio, ratio


def test_ratio_of_rates_is_own_over_other() -> None:
    one = ratio("decode_tok_per_s", [20.0, 22.0, 21.0], [10.0, 10.0, 14.0])
    assert one == Ratio(value=2.1, lowest=1.5, highest=2.2, num_rounds=3)


def test_ratio_of_times_is_other_over_own() -> None:
    one = ratio("ttft_ms", [100.0, 200.0, 200.0], [400.0, 300.0, 500.0])
    assert one == Ratio(value=2.0, lowest=1.5, highest=4.0, num_rounds=3)


def test_seconds_are_a_time_and_tokens_per_second_are_not() -> None:
    assert ratio("wall_s", [1.0], [2.0]).value == 2.0
    assert ratio("output_tok_per_s", [1.0], [2.0]).value == 0.5


def test_rounds_that_one_engine_lacks_are_left_out() -> None:
    assert ratio("wall_s", [1.0, 1.0], [3.0]) == Ratio(3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize(
    ("target", "verdict"), [(1.4, "shown"), (1.5, "shown"), (1.9, "not shown"), (2.3, "missed")]
)
def test_target_inside_the_spread_counts_as_not_shown(target: float, verdict: str) -> None:
    assert Ratio(value=2.0, lowest=1.5, highest=2.2, num_rounds=7).verdict(target) == verdict


def test_few_rounds_show_nothing() -> None:
    assert Ratio(2.0, 2.0, 2.0, num_rounds=6).verdict(1.0) == "not shown: 6 of 7 rounds"
