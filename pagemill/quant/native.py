"""Weights kept in the model's dtype, packed for the native kernels. Needs the extension.

A layer's rows wait in the file until the layer is complete, and are packed slice by slice from there
(`quant.waiting`). What comes in another shape is written as plain rows first, which are freed when they
are packed: beside one copy of all weights there is never more than one layer. A tied embedding is packed
with the head, and its rows are read out of the tiles.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill.device.host_memory import lazy_zeros
from pagemill.ops import cpu as native_ops
from pagemill.ops import cpu_layers
from pagemill.ops import reference as ops
from pagemill.ops.reference import activation_outputs
from pagemill.quant.base import LinearShape
from pagemill.quant.waiting import WaitingMatrix, drop_rows, slices


class NativeDense(WaitingMatrix):
    """Filled like the plain format; `finish` replaces `weight` by `packed`."""

    def finish(self, layer: nn.Module) -> None:
        """Pack the rows of a layer, those that wait straight from the file."""
        shape, weight = _shape(layer), cast(Tensor, layer.weight)
        fused = shape.gate is not None and native_ops.fuses_gate(shape.gate)
        parts = 2 if fused else 1
        tiles, *tile = native_ops.packed_shape(
            shape.out_features // parts, shape.in_features, weight.dtype
        )
        sizes = (tiles * parts, *tile)
        if weight.is_meta:
            packed = torch.empty(sizes, dtype=weight.dtype, device="meta")
        else:
            packed = lazy_zeros(sizes, weight.dtype)
            native_ops.touch_tiles(packed, grain=parts)
            for rows in slices(layer, parts):
                native_ops.pack_linear(
                    rows.values, packed, tile_first=rows.first_tile(parts), tile_step=parts
                )
        drop_rows(layer)
        layer.register_parameter("packed", nn.Parameter(packed, requires_grad=False))

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply; bias and residual are added to the float32 sums, which are rounded once."""
        return native_ops.linear(
            x,
            cast(Tensor, layer.packed),
            _shape(layer).out_features,
            cast("Tensor | None", layer.bias),
            residual=residual,
            out_dtype=out_dtype,
        )

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply and apply the gate to the float32 sums, where the kernel knows the activation."""
        shape = _shape(layer)
        assert shape.gate is not None
        if not native_ops.fuses_gate(shape.gate):
            return ops.act_and_mul(self.apply(layer, x), ops.activation(shape.gate))
        return native_ops.linear(
            x,
            cast(Tensor, layer.packed),
            shape.out_features // 2,
            cast("Tensor | None", layer.bias),
            gate=shape.gate,
        )

    def gated_outputs(self, gate: str) -> int:
        """Count the result alone where the gate is fused."""
        return 1 if native_ops.fuses_gate(gate) else 2 + activation_outputs(gate)

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Look the rows up; in the tiles, if the matrix is also a head."""
        weight = cast("Tensor | None", layer.weight)
        if weight is not None:
            return cpu_layers.embedding(ids, weight)
        shape = _shape(layer)
        return native_ops.linear_rows(
            ids, cast(Tensor, layer.packed), shape.out_features, shape.in_features
        )


def _shape(layer: nn.Module) -> LinearShape:
    return cast(LinearShape, layer.shape)
