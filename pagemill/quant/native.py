"""Weights kept in the model's dtype, packed for the native kernels. Needs the extension.

A layer's rows wait in the file until the layer is complete, and are packed piece by piece from there.
What comes in another shape is written as plain rows first, which are freed when they are packed: beside
one copy of all weights there is never more than one layer. A tied embedding is packed with the head, and
its rows are read out of the tiles.
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
from pagemill.quant.base import LinearShape, Target
from pagemill.quant.none import Unquantized
from pagemill.quant.waiting import StoredRows, WaitingRows


class NativeDense(Unquantized):
    """Filled like the plain format; `finish` replaces `weight` by `packed`."""

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the unfilled matrix in pages of its own, which the system gets back when it is packed.

        What malloc is given back it may keep: here that would be a second copy of the weights.
        """
        if device.type == "meta":
            return super().allocate(shape, dtype, device)
        return lazy_zeros(shape, dtype)

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register unfilled rows, which take no memory until they are written."""
        super().create_weights(layer, shape, dtype, device)
        layer.waiting = []  # type: ignore[assignment]

    def targets(self, layer: nn.Module, start: int, stop: int) -> dict[str, Target]:
        """Return the rows of the matrix, which wait for `finish`, and those of the bias."""
        found = super().targets(layer, start, stop)
        rows = found["weight"]
        found["weight"] = WaitingRows(rows.view, rows.shape, start=start, waiting=_waiting(layer))
        return found

    def finish(self, layer: nn.Module) -> None:
        """Pack the rows of a layer, those that wait straight from the file."""
        shape, weight = _shape(layer), cast(Tensor, layer.weight)
        fused = shape.gate is not None and native_ops.fuses_gate(shape.gate)
        parts = 2 if fused else 1
        part_rows = shape.out_features // parts
        tiles, *tile = native_ops.packed_shape(part_rows, shape.in_features, weight.dtype)
        sizes = (tiles * parts, *tile)
        if weight.is_meta:
            packed = torch.empty(sizes, dtype=weight.dtype, device="meta")
        else:
            packed = lazy_zeros(sizes, weight.dtype)
            native_ops.touch_tiles(packed, grain=parts)
            for rows in _sources(layer, part_rows):
                for part in range(parts):
                    _pack(rows, packed, part, parts, part_rows)
        _waiting(layer).clear()
        layer.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
        layer.register_parameter("weight", None)

    def finish_lookup(self, layer: nn.Module) -> None:
        """Fill the matrix with the rows that wait."""
        weight, waiting = cast(Tensor, layer.weight), _waiting(layer)
        for rows in waiting:
            rows.copy_to(weight)
        waiting.clear()

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


def _sources(layer: nn.Module, part_rows: int) -> list[StoredRows]:
    """Return all rows of a layer, cut where tiles begin.

    Waiting rows that begin or end inside a tile are copied to the matrix, to be packed with their
    neighbours.
    """
    weight = cast(Tensor, layer.weight)
    columns = weight.shape[1]
    sources: list[StoredRows] = []
    end = 0
    for rows in sorted(_waiting(layer), key=lambda rows: rows.start):
        if not (_begins_tile(rows.start, part_rows) and _begins_tile(rows.stop, part_rows)):
            rows.copy_to(weight)
            continue
        if rows.start > end:
            sources.append(StoredRows(end, weight[end : rows.start], columns, weight.dtype))
        sources.append(rows)
        end = rows.stop
    if end < len(weight):
        sources.append(StoredRows(end, weight[end:], columns, weight.dtype))
    return sources


def _begins_tile(row: int, part_rows: int) -> bool:
    return row % part_rows % native_ops.TILE == 0


def _pack(rows: StoredRows, packed: Tensor, part: int, parts: int, part_rows: int) -> None:
    """Pack those of the rows that belong to a part, whose tiles alternate with the other parts'."""
    low = part * part_rows
    first, stop = max(rows.start, low), min(rows.stop, low + part_rows)
    for start, values in rows.slices(first, stop, native_ops.TILE):
        tile = (start - low) // native_ops.TILE
        native_ops.pack_linear(values, packed, tile_first=part + tile * parts, tile_step=parts)


def _waiting(layer: nn.Module) -> list[StoredRows]:
    return cast("list[StoredRows]", layer.waiting)


def _shape(layer: nn.Module) -> LinearShape:
    return cast(LinearShape, layer.shape)
