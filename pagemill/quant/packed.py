"""What formats with packed weights share: a layer that holds a `PackedMatrix`, and its use.

A method fills a `PackedMatrix` (`pack`, or `unfilled` and `fill` for slices of rows) and gives it to a
layer with `keep`; `PackedLayers` has the rest of a QuantMethod for such layers. The native kernels are
used where they are built, plain torch elsewhere. Called by the methods of this room.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill import native
from pagemill.device.host_memory import lazy_zeros
from pagemill.ops import reference as ops
from pagemill.ops.packed import (
    CODECS,
    FUSED_GATES,
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    PackedFormat,
    PackedMatrix,
    Product,
    ReferenceProduct,
    fill,
    num_groups,
    pack,
    unfilled,
)
from pagemill.ops.reference import activation_outputs
from pagemill.quant.base import LinearShape

__all__ = [
    "CODECS", "FUSED_GATES", "SIGNED_TABLE", "UNSIGNED_TABLE", "PackedFormat", "PackedLayers",
    "PackedMatrix", "Product", "fill", "keep", "make_product", "num_groups", "pack", "parts_of",
    "unfilled", "unfilled_for",
]  # fmt: skip


def make_product(matrix: PackedMatrix) -> Product:
    """Return the matrix with the fastest arithmetic there is for it."""
    if native.extension() is None:
        return ReferenceProduct(matrix)
    from pagemill.ops.cpu_quant import NativeProduct  # it needs the extension

    return NativeProduct(matrix)


def unfilled_for(
    form: PackedFormat, out_features: int, in_features: int, device: torch.device, *, parts: int = 1
) -> PackedMatrix:
    """Return an unfilled matrix in pages of its own, or on the meta device."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return lazy_zeros(shape, dtype)

    return unfilled(form, out_features, in_features, allocate, parts=parts)


def parts_of(shape: LinearShape) -> int:
    """Return in how many parts a layer is packed: 2 where its gate can be fused, else 1."""
    return 2 if shape.gate in FUSED_GATES else 1


def keep(layer: nn.Module, matrix: PackedMatrix, dtype: torch.dtype) -> None:
    """Make the matrix the layer's weights: its tensors become parameters, `product` multiplies.

    `dtype` is what activations have, and rows that are looked up.
    """
    layer.row_dtype = dtype  # type: ignore[assignment]
    for name, tensor in matrix.tensors().items():
        layer.register_parameter(f"packed_{name}", nn.Parameter(tensor, requires_grad=False))
    if not matrix.codes.is_meta:
        layer.product = make_product(matrix)  # type: ignore[assignment]


class PackedLayers:
    """The use of layers that `keep` was called on; `bias` is a parameter in x's dtype, or None."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply; bias and residual are added to the float32 sums, which are rounded once."""
        return _product(layer).apply(x, _bias(layer), residual=residual, out_dtype=out_dtype)

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply and apply the gate to the float32 sums, where it is fused."""
        gate = cast(LinearShape, layer.shape).gate
        assert gate is not None
        if gate not in FUSED_GATES:
            return ops.act_and_mul(self.apply(layer, x), ops.activation(gate))
        return _product(layer).apply(x, _bias(layer), gate=gate)

    def gated_outputs(self, gate: str) -> int:
        """Count the result alone where the gate is fused; the reference needs float32 sums."""
        if gate not in FUSED_GATES:
            return 2 + activation_outputs(gate)
        return 1 if native.extension() is not None else 8

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return dequantized rows in the model's dtype, which the layer holds as `row_dtype`."""
        return _product(layer).rows(ids, cast(torch.dtype, layer.row_dtype))


def _product(layer: nn.Module) -> Product:
    return cast(Product, layer.product)


def _bias(layer: nn.Module) -> Tensor | None:
    return cast("Tensor | None", layer.bias)
