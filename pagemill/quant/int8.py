"""int8 weights with one scale an output, times activations that become int8 on the way in.

`Int8` rounds a checkpoint's weights while it is loaded (`--quantization int8`): as soon as a layer is
complete, its rows slice by slice, straight from the file. `Int8Layers` keeps and multiplies codes that
already are int8; formats of files that bring such use it too. How codes lie in memory is the store's:
tiles for the native kernels (`int8_native`), plain rows without them (`int8_torch`); sums are exact either
way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from pagemill import native
from pagemill.errors import CheckpointError
from pagemill.ops import reference as ops
from pagemill.ops.reference import PER_ROW, Int8Rounding, activation_outputs
from pagemill.quant.base import LinearShape
from pagemill.quant.waiting import RowSlice, drop_rows, slices
from pagemill.quant.while_loading import QuantizedWhileLoading

MAX_IN_FEATURES = 65536  # of exact sums in 32 bits


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """The weights of one layer in a store's own layout."""

    codes: Tensor  # int8 [out, in], or uint8 tiles
    scales: Tensor  # float32, an output each
    sums: Tensor | None  # int32, of each output's codes; where activations have zero points
    shape: LinearShape
    bias: Tensor | None  # [out] in the activations' dtype
    how: Int8Rounding  # of activations


class Int8Store(Protocol):
    """Where codes lie and who multiplies them. Shapes and meanings as in `Int8Layers`."""

    def pack(
        self, shape: LinearShape, codes: Tensor, scales: Tensor, *, with_sums: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and sums in the store's layout; on the meta device too."""
        ...

    def parts(self, shape: LinearShape) -> int:
        """Return in how many parts the layer's rows are kept: 2 where its gate is fused, else 1."""
        ...

    def quantize(self, shape: LinearShape, rows: Iterable[RowSlice]) -> tuple[Tensor, Tensor]:
        """Return codes and scales of slices of `parts`, all rows; NotFiniteError where one is not."""
        ...

    def multiply(
        self,
        weights: Int8Weights,
        x: Tensor,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """Return the product, in `out_dtype` or x's, or the residual it was added to."""
        ...

    def multiply_gated(self, weights: Int8Weights, x: Tensor) -> Tensor:
        """Return act(gate) * up, for an activation that `fuses` knows."""
        ...

    def fuses(self, gate: str) -> bool:
        """Return whether `multiply_gated` knows the activation."""
        ...

    def rows(self, weights: Int8Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the matrix."""
        ...


def store_at_hand() -> Int8Store:
    """Return the native store where the extension is built, else the plain one."""
    if native.extension() is None:
        from pagemill.quant.int8_torch import TorchInt8Store

        return TorchInt8Store()
    from pagemill.quant.int8_native import NativeInt8Store

    return NativeInt8Store()


class Int8Layers:
    """Keeps int8 weights on layers, as parameters `codes`, `scales` and `sums`, and multiplies them.

    A layer is a module with its `LinearShape` as `shape` and a parameter `bias` or None.
    """

    def __init__(self, store: Int8Store | None = None) -> None:
        self.store = store or store_at_hand()

    def attach(
        self, layer: nn.Module, codes: Tensor, scales: Tensor, how: Int8Rounding = PER_ROW
    ) -> None:
        """Put weights on a layer: codes [out, in] int8 and scales [out] float32, neither of them kept.

        Rows are in the layer's order (a gate's before its up's); they may be on the meta device. `how`
        says how activations become codes.
        """
        shape = _shape(layer)
        assert codes.shape == (shape.out_features, shape.in_features) and codes.dtype == torch.int8
        assert scales.shape == codes.shape[:1] and scales.dtype == torch.float32
        _check_inputs(shape)
        packed = self.store.pack(shape, codes, scales, with_sums=how.has_zero_points)
        self._keep(layer, *packed, how)

    def quantize(self, layer: nn.Module) -> None:
        """Put the layer's own rows on it, each rounded by its largest absolute value."""
        shape = _shape(layer)
        _check_inputs(shape)
        codes, scales = self.store.quantize(shape, slices(layer, self.store.parts(shape)))
        self._keep(layer, codes, scales, None, PER_ROW)

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply; bias and residual are added to the float32 results, which are rounded once."""
        return self.store.multiply(_weights(layer), x, residual, out_dtype)

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Multiply and apply the gate, to the float32 results where the store knows the activation."""
        gate = _shape(layer).gate
        assert gate is not None
        if not self.store.fuses(gate):
            return ops.act_and_mul(self.apply(layer, x), ops.activation(gate))
        return self.store.multiply_gated(_weights(layer), x)

    def gated_outputs(self, gate: str) -> int:
        """Count the result alone where the gate is fused."""
        return 1 if self.store.fuses(gate) else 2 + activation_outputs(gate)

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return rows ids [count] int64 of the matrix, codes times scales in the layer's `row_dtype`."""
        return self.store.rows(_weights(layer), ids, cast(torch.dtype, layer.row_dtype))

    @staticmethod
    def _keep(
        layer: nn.Module, codes: Tensor, scales: Tensor, sums: Tensor | None, how: Int8Rounding
    ) -> None:
        for name, tensor in (("codes", codes), ("scales", scales), ("sums", sums)):
            kept = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, kept)
        bias = cast("Tensor | None", getattr(layer, "bias", None))
        vars(layer)["int8"] = Int8Weights(codes, scales, sums, _shape(layer), bias, how)


class Int8(QuantizedWhileLoading):
    """Codes of 8 bits and a scale an output."""

    def __init__(self, store: Int8Store | None = None) -> None:
        self._layers = Int8Layers(store)
        super().__init__(self._layers)

    def finish(self, layer: nn.Module) -> None:
        """Round the rows of a layer, those that wait straight from the file, and let go of them."""
        weight = cast(Tensor, layer.weight)
        if weight.is_meta:
            codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
            scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
            self._layers.attach(layer, codes, scales)
        else:
            self._layers.quantize(layer)
        drop_rows(layer)


def _check_inputs(shape: LinearShape) -> None:
    if shape.in_features > MAX_IN_FEATURES:
        raise CheckpointError(
            f"a layer has {shape.in_features} inputs; int8 products are exact up to "
            f"{MAX_IN_FEATURES}. Choose another quantization"
        )


def _weights(layer: nn.Module) -> Int8Weights:
    return cast(Int8Weights, vars(layer)["int8"])


def _shape(layer: nn.Module) -> LinearShape:
    return cast(LinearShape, layer.shape)
