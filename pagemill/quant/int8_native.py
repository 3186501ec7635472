"""int8 weights in tiles for the native kernels; see csrc/linear_int8. Needs the extension.

Made by `quant.int8`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pagemill.device.host_memory import lazy_zeros
from pagemill.ops import cpu as native_ops
from pagemill.ops import cpu_int8 as native_int8
from pagemill.quant.base import LinearShape, NotFiniteError
from pagemill.quant.int8 import Int8Weights
from pagemill.quant.waiting import RowSlice


class NativeInt8Store:
    """Tiles of 16 outputs; the tiles of a gate and of its up take turns where they are fused."""

    def pack(
        self, shape: LinearShape, codes: Tensor, scales: Tensor, *, with_sums: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy into tiles."""
        parts = self.parts(shape)
        packed, packed_scales, sums = _room(shape, parts, codes.device, with_sums=with_sums)
        if not codes.is_meta:
            scales = scales.contiguous()
            for i, rows in enumerate(codes.chunk(parts)):
                native_int8.pack(
                    rows, scales[i * len(rows) :][: len(rows)], packed, packed_scales, sums,
                    tile_first=i, tile_step=parts,
                )  # fmt: skip
        return packed, packed_scales, sums

    def parts(self, shape: LinearShape) -> int:
        """Return 2 where the kernel knows the gate, else 1."""
        return 2 if shape.gate is not None and self.fuses(shape.gate) else 1

    def quantize(self, shape: LinearShape, rows: Iterable[RowSlice]) -> tuple[Tensor, Tensor]:
        """Round into tiles."""
        parts = self.parts(shape)
        packed, packed_scales, _ = _room(shape, parts, torch.device("cpu"), with_sums=False)
        for some in rows:
            try:
                native_int8.quantize(
                    some.values, packed, packed_scales,
                    tile_first=some.first_tile(parts), tile_step=parts,
                )  # fmt: skip
            except ValueError as error:
                raise NotFiniteError((shape.out_features, shape.in_features), "int8") from error
        return packed, packed_scales

    def multiply(
        self,
        weights: Int8Weights,
        x: Tensor,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """Multiply, with bias and residual fused."""
        return native_int8.linear_int8(
            x,
            weights.codes,
            weights.scales,
            weights.shape.out_features,
            weights.bias,
            sums=weights.sums,
            how=weights.how,
            residual=residual,
            out_dtype=out_dtype,
        )

    def multiply_gated(self, weights: Int8Weights, x: Tensor) -> Tensor:
        """Multiply, with bias and gate fused."""
        return native_int8.linear_int8(
            x,
            weights.codes,
            weights.scales,
            weights.shape.out_features // 2,
            weights.bias,
            sums=weights.sums,
            how=weights.how,
            gate=weights.shape.gate,
        )

    def fuses(self, gate: str) -> bool:
        """Ask the kernel."""
        return native_ops.fuses_gate(gate)

    def rows(self, weights: Int8Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Read rows out of the tiles."""
        sizes = (weights.shape.out_features, weights.shape.in_features)
        return native_int8.linear_int8_rows(ids, weights.codes, weights.scales, sizes, dtype)


def _room(
    shape: LinearShape, parts: int, device: torch.device, *, with_sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return unfilled codes, scales and sums."""
    tiles, *tile = native_int8.packed_shape(shape.out_features // parts, shape.in_features)
    sizes, count = (tiles * parts, *tile), tiles * parts * native_ops.TILE
    if device.type == "meta":
        packed = torch.empty(sizes, dtype=torch.uint8, device=device)
    else:
        packed = lazy_zeros(sizes, torch.uint8)
    scales = torch.zeros(count, dtype=torch.float32, device=device)
    sums = torch.zeros(count, dtype=torch.int32, device=device) if with_sums else None
    return packed, scales, sums
