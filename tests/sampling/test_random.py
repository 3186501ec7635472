"""The counter-based generator: known answers, range, independence of lanes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling.random import philox4x32, uniforms

# Known answers published with the Random123 library (philox4x32, 10 rounds).
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(text: str) -> np.ndarray:
    return np.array([[int(w, 16)] for w in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert philox4x32(_words(counter), _words(key)).tolist() == _words(answer).tolist()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 16383), st.integers(0, 2**40)),
        min_size=1,
        max_size=8,
    )
)
def test_a_draw_depends_on_its_own_lane_only(lanes: list[tuple[int, int, int]]) -> None:
    seeds, indices, positions = zip(*lanes, strict=True)
    together = uniforms(seeds, indices, positions)
    alone = [float(uniforms([s], [i], [p])[0]) for s, i, p in lanes]
    assert together.tolist() == alone
    assert ((together >= 0.0) & (together < 1.0)).all()


def test_seed_index_and_position_each_change_the_draw() -> None:
    draws = uniforms([7, 8, 7, 7], [0, 0, 1, 0], [5, 5, 5, 6])
    assert len(set(draws.tolist())) == 4


def test_draws_over_positions_are_uniform() -> None:
    n = 64_000
    draws = uniforms([3] * n, [0] * n, range(n))
    counts = np.bincount((draws * 64).astype(int), minlength=64)
    chi_square = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
