"""Native sampling: against numpy's, and each row the same whatever travels with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill import native
from pagemill.sampling import logprobs
from pagemill.sampling.penalties import apply_penalties
from pagemill.sampling.row_math import NumpyRows, SampleRow
from tests.ops.conftest import needs_extension
from tests.sampling.rows import row, spec

if native.extension() is not None:
    from pagemill.ops import cpu_sampling as ops
    from pagemill.sampling.native_rows import NativeRows

pytestmark = needs_extension
FEW = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = st.integers(0, 2**32)
SIZES = st.sampled_from([1, 3, 200, 256, 257, 700, 5000])
KINDS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 900, "top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 0.001, "top_p": 0.7},
    {"min_p": 1.0, "top_k": 3},
    {"temperature": 1e300},
    {"temperature": 2e-5, "top_p": 0.5},
]


def draw_logits(rows: int, vocab: int, seed: int, scale: float = 2.0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((rows, vocab))
    return (numbers * scale).astype(np.float32)


def sampled(logits: np.ndarray, rows: list[SampleRow], math: object) -> list[tuple[int, ...]]:
    highest = math.best(logits)[1]  # type: ignore[attr-defined]
    return math.draw(logits, highest, range(len(rows)), rows).tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@FEW
@given(
    seed=SEEDS, vocab=SIZES, scale=st.sampled_from([0.0, 0.01, 1.0, 6.0]), ties=st.booleans(),
    masked=st.booleans(),
)  # fmt: skip
def test_draws_are_numpys(
    isa: str, kind: dict, seed: int, vocab: int, scale: float, ties: bool, masked: bool
) -> None:
    logits = draw_logits(3, vocab, seed, scale)
    if ties:
        logits = np.round(logits)
    if masked:
        logits[:, 1::3] = -np.inf
    rows = [
        row((1,) * i, samples=20, seed=seed - 2**31 + i, **{"temperature": 1.0, **kind})
        for i in range(3)
    ]
    ours, theirs = (sampled(logits, rows, math) for math in (NativeRows(), NumpyRows()))
    same = sum(
        a == b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True)
    )
    # Exponentials differ in their last bit; one draw in a hundred million notices.
    assert same >= 59, (ours, theirs)


@FEW
@given(seed=SEEDS, vocab=SIZES, ties=st.booleans())
def test_the_best_entry_is_the_first_of_the_largest(
    isa: str, seed: int, vocab: int, ties: bool
) -> None:
    logits = draw_logits(5, vocab, seed)
    if ties:
        logits = np.round(logits)
    logits[1] = -np.inf
    logits[2, vocab // 2] = np.inf
    best, highest = ops.best_rows(logits)
    want = logits.argmax(axis=1)
    assert best.tolist() == want.tolist()
    assert highest.tolist() == logits[np.arange(5), want].tolist()
    logits[3, vocab - 1] = np.nan
    assert np.isnan(ops.best_rows(logits)[1]).tolist() == [False, False, False, True, False]


@FEW
@given(seed=SEEDS, vocab=SIZES, ties=st.booleans(), count=st.sampled_from([0, 1, 20, -1]))
def test_scores_are_those_of_float64_and_of_a_full_sort(
    isa: str, seed: int, vocab: int, ties: bool, count: int
) -> None:
    logits = draw_logits(2, vocab, seed, 5.0)
    if ties:
        logits = np.round(logits)
    logits[1, 0] = -np.inf if vocab > 1 else 0.0
    tokens = [(0, vocab - 1), (vocab // 2,)]
    got = NativeRows().score(logits, tokens, [count, count], normalize=True)
    for i in range(2):
        wide = logits[i].astype(np.float64)
        shifts = np.exp(wide - wide.max()).sum()
        normalizer = wide.max() + np.log(shifts)
        order = np.lexsort((np.arange(vocab), -wide))
        wanted = vocab if count < 0 else min(count, vocab)
        for token, score in zip(tokens[i], got[i], strict=True):
            assert score.token_id == token and score.rank == logprobs.rank(logits[i], token)
            assert score.logprob == pytest.approx(wide[token] - normalizer, abs=1e-6)
            assert score.top_ids == tuple(order[:wanted].tolist())
            assert score.top_logprobs == pytest.approx(wide[order[:wanted]] - normalizer, abs=1e-6)


@FEW
@given(
    seed=SEEDS,
    prompt=st.lists(st.integers(0, 40), max_size=12),
    output=st.lists(st.integers(0, 40), max_size=12),
    repetition=st.sampled_from([1.0, 1.3, 0.5, 1e-40, 1e300]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, 1.1, -0.3]),
)
def test_penalties_have_numpys_bits(
    seed: int, prompt: list, output: list, repetition: float, frequency: float, presence: float
) -> None:
    theirs = draw_logits(1, 41, seed, 5.0)[0]
    theirs[::7] = -np.inf
    ours = theirs.copy()
    settings = spec(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    tokens = np.array([*prompt, *output], np.int32)
    apply_penalties(theirs, settings, tokens, len(prompt))
    NativeRows().penalize(ours, settings, tokens, len(prompt))
    assert ours.tolist() == theirs.tolist()
    # The table of counts is clean again.
    again = draw_logits(1, 41, seed, 5.0)[0]
    again[::7] = -np.inf
    NativeRows().penalize(again, settings, tokens, len(prompt))
    assert again.tolist() == ours.tolist()


@pytest.mark.parametrize("vocab", [1003, 49_152])
def test_a_row_is_the_same_among_others_at_any_position(isa: str, vocab: int) -> None:
    module = native.required()
    count = 30 if vocab < 10_000 else 8
    logits = draw_logits(count, vocab, 3)
    rows = [
        row((1,) * i, samples=3, seed=i, **{"temperature": 0.9, **KINDS[i % len(KINDS)]})
        for i in range(count)
    ]
    math = NativeRows()
    module.set_num_threads(1)
    alone = [sampled(logits[i : i + 1], rows[i : i + 1], math)[0] for i in range(count)]
    scores = [
        math.score(logits[i : i + 1], [alone[i]], [5], normalize=True)[0] for i in range(count)
    ]
    for threads in (1, 2):
        module.set_num_threads(threads)
        for m in range(1, count + 1):
            start = (m * 7919) % (count + 1 - m)
            part = slice(start, start + m)
            assert sampled(logits[part], rows[part], math) == alone[part]
            assert math.score(logits[part], alone[part], [5] * m, normalize=True) == scores[part]


def test_every_path_gives_the_same_bits() -> None:
    module = native.required()
    before = module.active_isa()
    logits = draw_logits(len(KINDS), 2003, 9)
    rows = [row(samples=4, seed=1, **{"temperature": 1.0, **kind}) for kind in KINDS]
    seen = []
    for name in module.available_isas().split(", "):
        native.use_isa(name)
        tokens = sampled(logits, rows, NativeRows())
        scores = NativeRows().score(logits, tokens, [3] * len(rows), normalize=True)
        seen.append((tokens, scores))
    native.use_isa(before)
    assert all(result == seen[0] for result in seen[1:])


def test_rows_may_lie_apart(isa: str) -> None:
    room = draw_logits(5, 900, 1)
    inner, rows = room[:, 100:801], [row(samples=3, seed=i, temperature=1.0) for i in range(5)]
    math = NativeRows()
    assert sampled(inner, rows, math) == sampled(np.ascontiguousarray(inner), rows, math)


def test_numbers_that_make_no_sense_are_refused() -> None:
    logits = draw_logits(1, 10, 1)
    one = np.array([1], np.int64)
    with pytest.raises(ValueError, match="score_rows: chosen must be ids of the vocabulary"):
        ops.score_rows(logits, np.array([10], np.int64), np.array([0, 1], np.int64), one)
    with pytest.raises(ValueError, match="penalize_row: tokens must be ids of the vocabulary"):
        ops.penalize_row(
            logits[0], np.array([-1], np.int32), 0, repetition=1.0, frequency=1.0, presence=0.0
        )
    with pytest.raises(ValueError, match="draw_rows: numbers must hold a positive temperature"):
        ops.draw_rows(logits, np.zeros(1, np.float32), np.zeros((1, 3)), np.zeros((1, 6), np.int64))
