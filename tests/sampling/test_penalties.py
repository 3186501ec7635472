"""Each penalty by itself, on what it covers and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagemill.sampling.penalties import apply_penalties
from tests.sampling.rows import spec

LOGITS = [2.0, -2.0, 0.0, 3.0, 4.0]
PROMPT = [0, 0, 1]
OUTPUT = [3, 3, 1]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        # repetition: prompt and output, once however often a token came
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.0, 1.5, 4.0]),
        ({"repetition_penalty": 0.5}, [4.0, -1.0, 0.0, 6.0, 4.0]),
        # frequency: output only, per count
        ({"frequency_penalty": 0.5}, [2.0, -2.5, 0.0, 2.0, 4.0]),
        # presence: output only, once
        ({"presence_penalty": 0.5}, [2.0, -2.5, 0.0, 2.5, 4.0]),
        # all: repetition first, then the subtractions
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": -0.25},
            [1.0, -4.25, 0.0, 0.75, 4.0],
        ),
    ],
)
def test_penalty_by_example(fields: dict[str, Any], wanted: list[float]) -> None:
    logits = np.array(LOGITS, np.float32)
    apply_penalties(logits, spec(**fields), np.array(PROMPT + OUTPUT, np.int32), len(PROMPT))
    assert logits.tolist() == wanted


def test_prompt_alone_is_penalized_by_repetition_only() -> None:
    tokens = np.array([4, 4, 4], np.int32)
    for fields, changed in [
        ({"repetition_penalty": 2.0}, True),
        ({"frequency_penalty": 2.0}, False),
        ({"presence_penalty": 2.0}, False),
    ]:
        logits = np.array(LOGITS, np.float32)
        apply_penalties(logits, spec(**fields), tokens, 3)
        assert (logits.tolist() != LOGITS) == changed


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-38, 1e38, 1e39, 1.7e308])
def test_every_legal_repetition_penalty_leaves_finite_logits(penalty: float) -> None:
    logits = np.array([2.0, -2.0, 0.0, -np.inf, 4.0], np.float32)
    tokens = np.array([0, 1, 2, 3], np.int32)
    apply_penalties(logits, spec(repetition_penalty=penalty), tokens, 4)
    assert np.isfinite(logits[[0, 1, 2, 4]]).all()
    assert logits[3] == -np.inf, "what is masked stays so"
    assert logits[2] == 0.0
    assert np.isfinite(logits[0] - logits[1])
    if penalty < 1:
        assert logits[0] > 4.0 and -2.0 < logits[1] <= 0.0
    else:
        assert logits[0] < 2.0 and logits[1] < -2.0
