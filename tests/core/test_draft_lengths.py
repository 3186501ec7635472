"""How many drafts pay: by acceptance, by load, by what a request may still say."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.config import SpeculativeConfig
from pagemill.core.draft_lengths import DraftLengths
from pagemill.core.sequence import Sequence, SequenceGroup
from pagemill.core.step_costs import place
from pagemill.messages import ScheduledSequence, SchedulerOutput, SequenceOutput, StepOutput
from tests.core.fake_ranks import make_request

CONFIG = SpeculativeConfig(
    method="fake", num_speculative_tokens=8, adaptive_length=True, options={}, max_drafts=64
)


def make_sequence(number: int = 0, *, max_tokens: int = 1000) -> Sequence:
    request = make_request(f"r{number}", 10, max_tokens=max_tokens)
    group = SequenceGroup(request, number, 1, is_forked=True)
    return Sequence(number, group, 0, request.prompt_token_ids, 11, [5], num_computed=10)


def measure(lengths: DraftLengths, num_sequences: int, num_drafted: int, seconds: float) -> None:
    """Let two steps pass: that many decodes, the drafts all with the first."""
    parts = tuple(ScheduledSequence(i, 10, 1, 0, (), 1) for i in range(num_sequences))
    outputs = tuple(
        SequenceOutput(i, ((1,),), num_drafted=num_drafted if i == 0 else 0)
        for i in range(num_sequences)
    )
    step = SchedulerOutput(step_id=0, scheduled=parts)
    result = StepOutput(0, outputs, {"model": seconds, "draft_preparation": 9.0})
    for _ in range(2):
        lengths.learn_costs(step, result)


def with_costs(*, base: float, per_token: float, most: int = 128) -> DraftLengths:
    """Return lengths that know what steps of up to `most` tokens take."""
    lengths = DraftLengths(CONFIG, 2000)
    for count in sorted({place(number) for number in range(1, most + 1)}):
        measure(lengths, 1, count - 1, base + per_token * count)
        measure(lengths, count, 0, base + per_token * count)
    return lengths


def feed(lengths: DraftLengths, sequence: Sequence, right: int, of: int, times: int = 20) -> None:
    for _ in range(times):
        lengths.learn(sequence, of, right)


def test_a_sequence_whose_drafts_are_right_gets_the_longest() -> None:
    lengths = with_costs(base=1.0, per_token=0.02)
    sequence = make_sequence()
    feed(lengths, sequence, 8, 8)
    assert lengths.choose([sequence], 100) == [8]


def test_a_sequence_whose_drafts_are_wrong_gets_none() -> None:
    lengths = with_costs(base=1.0, per_token=0.02)
    sequence = make_sequence()
    feed(lengths, sequence, 0, 8)
    assert lengths.choose([sequence], 100) == [0]


def test_one_that_is_sometimes_right_gets_some() -> None:
    lengths = with_costs(base=1.0, per_token=0.1)
    sequence = make_sequence()
    feed(lengths, sequence, 1, 2)
    assert 0 < lengths.choose([sequence], 100)[0] < 8


def test_a_sequence_without_drafts_is_tried_again_later() -> None:
    lengths = with_costs(base=1.0, per_token=0.02)
    sequence = make_sequence()
    feed(lengths, sequence, 0, 8)
    for _ in range(32):
        assert lengths.choose([sequence], 100) == [0]
        lengths.learn(sequence, 0, 0)
    assert lengths.choose([sequence], 100) == [2]
    lengths.learn(sequence, 2, 0)
    assert lengths.choose([sequence], 100) == [0]


def test_where_tokens_cost_as_much_as_sequences_many_running_ones_get_none() -> None:
    """Weights read once a step are free for one sequence, and nothing beside fifty."""
    lengths = with_costs(base=4.0, per_token=1.0)
    sequences = [make_sequence(i) for i in range(50)]
    for sequence in sequences:
        feed(lengths, sequence, 4, 6)
    assert lengths.choose(sequences[:1], 100)[0] > 0
    assert lengths.choose(sequences, 100) == [0] * 50


def test_the_first_step_of_a_load_has_no_drafts_to_compare_with() -> None:
    lengths = DraftLengths(CONFIG, 2000)
    sequence = make_sequence()
    assert lengths.choose([sequence], 100) == [0]
    measure(lengths, 1, 0, 1.0)
    assert lengths.choose([sequence], 100) == [6]  # 0.7 ** 7 is under a tenth


def test_a_slow_proposer_makes_drafts_shorter() -> None:
    lengths = with_costs(base=1.0, per_token=0.0)
    sequence = make_sequence()
    feed(lengths, sequence, 3, 4)
    before = lengths.choose([sequence], 100)[0]
    lengths._seconds_a_draft = 0.6
    assert lengths.choose([sequence], 100)[0] < before


def test_no_more_is_drafted_than_a_request_may_still_say() -> None:
    lengths = DraftLengths(dataclasses.replace(CONFIG, adaptive_length=False), 2000)
    assert lengths.choose([make_sequence(max_tokens=5)], 100) == [3]
    assert lengths.choose([make_sequence(max_tokens=2)], 100) == [0]
    lengths = DraftLengths(dataclasses.replace(CONFIG, adaptive_length=False), 13)
    assert lengths.choose([make_sequence()], 100) == [1]  # positions 11 and 12 are left


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 100),
    st.booleans(),
)
def test_no_choice_is_over_the_limits(
    records: list[tuple[int, int]], num_free: int, adapts: bool
) -> None:
    config = dataclasses.replace(CONFIG, adaptive_length=adapts, max_drafts=20)
    lengths = DraftLengths(config, 2000)
    measure(lengths, len(records), 0, 1.0)
    sequences = []
    for number, (right, idle) in enumerate(records):
        sequence = make_sequence(number, max_tokens=6 if number % 3 == 0 else 100)
        feed(lengths, sequence, right, 8, times=number)
        for _ in range(idle):
            lengths.learn(sequence, 0, 0)
        sequences.append(sequence)
    chosen = lengths.choose(sequences, num_free)
    assert sum(chosen) <= min(num_free, 20)
    for number, length in enumerate(chosen):
        assert 0 <= length <= (4 if number % 3 == 0 else 8)
