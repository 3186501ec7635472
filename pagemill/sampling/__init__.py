"""From logits to tokens: masks, penalties, truncation, draws and logprobs.

`sampler.Sampler` is the only door; the worker calls it once a step. Every result of a row is a function
of that row alone: reductions run along one row in one fixed order, whatever rows travel with it.
"""

from __future__ import annotations

from pagemill.registry import Registry
from pagemill.sampling.row_math import RowMath

# Who works on whole rows of logits; the device says which it wants.
ROW_MATH: Registry[type[RowMath]] = Registry(
    "row arithmetic",
    {
        "native": "pagemill.sampling.native_rows:NativeRows",
        "torch": "pagemill.sampling.row_math:NumpyRows",
    },
)
