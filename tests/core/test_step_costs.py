"""What is learnt of how long steps take."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.core.step_costs import StepCosts, place


def test_nothing_known_means_that_all_steps_take_the_same() -> None:
    curve = StepCosts().curve()
    assert curve.at(1) == curve.at(1000) > 0


def test_between_two_measured_counts_the_seconds_lie_on_a_line() -> None:
    costs = StepCosts()
    for _ in range(2):
        costs.learn(2, 1.0)
        costs.learn(6, 3.0)
    assert [costs.curve().at(n) for n in (1, 2, 3, 4, 6, 9)] == [1.0, 1.0, 1.5, 2.0, 3.0, 3.0]


def test_a_step_slower_than_a_larger_one_counts_as_the_larger_one() -> None:
    costs = StepCosts()
    for _ in range(2):
        costs.learn(1, 5.0)
        costs.learn(4, 2.0)
    assert costs.curve().at(1) == costs.curve().at(3) == 2.0


def test_a_faster_step_is_believed_sooner_than_a_slower_one() -> None:
    costs = StepCosts()
    for seconds in (2.0, 2.0, 1.0):
        costs.learn(1, seconds)
    assert costs.curve().at(1) == pytest.approx(1.5)
    costs.learn(1, 2.5)
    assert costs.curve().at(1) == pytest.approx(1.6)


def test_what_was_measured_long_ago_is_forgotten_and_then_replaced() -> None:
    costs = StepCosts()
    costs.learn(7, 9.0)
    costs.learn(7, 9.0)
    for _ in range(300):
        costs.learn(1, 1.0)
    assert not costs.is_known(7)
    assert costs.curve().at(7) == 1.0
    for seconds in (8.0, 3.0):
        costs.learn(7, seconds)
    assert costs.curve().at(7) == 3.0


def test_a_count_is_known_when_it_was_measured_twice_and_the_faster_counts() -> None:
    """The first step of a kind does things that no later one does."""
    costs = StepCosts()
    costs.learn(3, 9.0)
    assert not costs.is_known(3)
    costs.learn(3, 1.0)
    assert costs.is_known(3)
    assert costs.curve().at(3) == 1.0


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 100_000))
def test_a_count_stands_for_those_an_eighth_above_it(num_tokens: int) -> None:
    count = place(num_tokens)
    assert place(count) == count <= num_tokens < count * 9 / 8 + 1
    assert num_tokens > 15 or count == num_tokens
