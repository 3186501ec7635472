"""Weights kept in the model's dtype, packed for the native kernels. Needs the extension.

A layer is filled as plain rows and packed as soon as it is complete, its rows freed: beside one copy
of all weights there is never more than one layer. A tied embedding is packed with the head, and its
rows are read out of the tiles.
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
from pagemill.quant.none import Unquantized


class NativeDense(Unquantized):
    """Filled like the plain format; `finish` replaces `weight` by `packed`."""

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the unfilled matrix in pages of its own, which the system gets back when it is packed.

        What malloc is given back it may keep: here that would be a second copy of the weights.
        """
        if device.type == "meta":
            return super().allocate(shape, dtype, device)
        return lazy_zeros(shape, dtype)

    def finish(self, layer: nn.Module) -> None:
        """Pack the rows of a layer and let go of them."""
        shape, weight = _shape(layer), cast(Tensor, layer.weight)
        rows = [weight]
        if shape.gate is not None and native_ops.fuses_gate(shape.gate):
            rows = list(weight.chunk(2))
        tiles, *tile = native_ops.packed_shape(len(rows[0]), shape.in_features, weight.dtype)
        sizes = (tiles * len(rows), *tile)
        if weight.is_meta:
            packed = torch.empty(sizes, dtype=weight.dtype, device="meta")
        else:
            packed = lazy_zeros(sizes, weight.dtype)
            for i, part in enumerate(rows):
                native_ops.pack_linear(part, packed, tile_first=i, tile_step=len(rows))
        layer.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
        layer.register_parameter("weight", None)

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
