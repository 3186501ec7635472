"""int8 weights as plain rows, multiplied in torch: the oracle, and the way without the extension.

Made by `quant.int8`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pagemill.ops import reference as ops
from pagemill.quant.base import LinearShape, NotFiniteError
from pagemill.quant.int8 import Int8Weights
from pagemill.quant.waiting import RowSlice

# Numbers of a weight that are rounded, and of a result that are float64 sums, at a time.
_SLICE = 1 << 22


class TorchInt8Store:
    """Codes [out, in] int8 and scales [out], as they come."""

    def pack(
        self, shape: LinearShape, codes: Tensor, scales: Tensor, *, with_sums: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy; the reference needs no sums."""
        return codes.clone(), scales.clone(), None

    def parts(self, shape: LinearShape) -> int:
        """Return 1."""
        return 1

    def quantize(self, shape: LinearShape, rows: Iterable[RowSlice]) -> tuple[Tensor, Tensor]:
        """Round some rows at a time."""
        codes = torch.empty(shape.out_features, shape.in_features, dtype=torch.int8)
        scales = torch.empty(shape.out_features, dtype=torch.float32)
        step = max(1, _SLICE // shape.in_features)
        for some in rows:
            for start in range(0, len(some.values), step):
                made, row_scales, _ = ops.int8_codes(some.values[start : start + step])
                where = slice(some.start + start, some.start + start + len(made))
                codes[where], scales[where] = made, row_scales.squeeze(1)
        if bool(scales.isnan().any()):
            raise NotFiniteError(codes.shape, "int8")
        return codes, scales

    def multiply(
        self,
        weights: Int8Weights,
        x: Tensor,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """Multiply, add the bias, then the residual; round once."""
        out = residual
        if out is None:
            out = torch.empty(len(x), weights.shape.out_features, dtype=out_dtype or x.dtype)
        step = max(1, _SLICE // weights.shape.out_features)
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            product = ops.linear_int8(
                x[rows], weights.codes, weights.scales, weights.bias, weights.how
            )
            out[rows] = product if residual is None else product.add_(out[rows])
        return out

    def multiply_gated(self, weights: Int8Weights, x: Tensor) -> Tensor:
        """Apply a gate that `fuses` knows; it knows none."""
        raise AssertionError("gates are applied by `Int8Layers`")

    def fuses(self, gate: str) -> bool:
        """Return False."""
        return False

    def rows(self, weights: Int8Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply rows of codes with their scales."""
        return (weights.codes[ids].to(torch.float32) * weights.scales[ids].unsqueeze(1)).to(dtype)
