"""Short ways to make sampler inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagemill.messages import SamplingSpec
from pagemill.sampling import ROW_MATH
from pagemill.sampling.row_math import SampleRow
from pagemill.sampling.sampler import SampledRow, Sampler


class Arithmetic:
    """Whose row arithmetic `sampler` uses: a key of ROW_MATH, set by the fixture `arithmetic`."""

    name = "torch"


def spec(**fields: Any) -> SamplingSpec:
    """Return a spec, greedy unless said otherwise."""
    return SamplingSpec(**{"temperature": 0.0, **fields})


def row(
    prompt: Sequence[int] = (), output: Sequence[int] = (), *, samples: int = 1, index: int = 0,
    **fields: Any,
) -> SampleRow:  # fmt: skip
    """Return a row over prompt and output tokens."""
    tokens = np.array([*prompt, *output], np.int32)
    return SampleRow(spec(**fields), tokens, len(prompt), index, samples)


def sampler(mode: str = "raw_logprobs", processors: Sequence[str] = ()) -> Sampler:
    """Return a sampler for a float32 model, with the arithmetic of the running test."""
    math = ROW_MATH.load(Arithmetic.name)()
    return Sampler(dtype="float32", logprobs_mode=mode, logits_processors=processors, math=math)


def run(
    logits: Any, *rows: SampleRow, mode: str = "raw_logprobs", processors: Sequence[str] = ()
) -> list[SampledRow]:
    """Sample rows; `logits` is copied."""
    matrix = torch.tensor(np.array(logits, np.float32)).reshape(len(rows), -1)
    return sampler(mode, processors).sample(matrix, rows)


def one(logits: Any, a_row: SampleRow, **more: Any) -> SampledRow:
    """Sample a single row."""
    return run([logits], a_row, **more)[0]
