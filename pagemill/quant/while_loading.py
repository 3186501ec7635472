"""Weights quantized while a checkpoint is loaded: what `--quantization int8` and `int4` share.

A layer's rows wait in the file until the layer is complete (`quant.waiting`); `finish` rounds them slice
by slice into what a `KeptLayers` multiplies, which replaces `weight`. An embedding that no head shares is
filled as it is. Called by `quant.int8` and `quant.int4`.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from pagemill import native
from pagemill.quant.base import LinearShape
from pagemill.quant.waiting import WaitingMatrix


class KeptLayers(Protocol):
    """Multiplies with layers in a quantized form; methods as a QuantMethod has them."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the layer's output."""
        ...

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return act(gate) * up."""
        ...

    def gated_outputs(self, gate: str) -> int:
        """Return the temporary memory of `apply_gated`, in results."""
        ...

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return rows in the dtype that the layer holds as `row_dtype`."""
        ...


class QuantizedWhileLoading(WaitingMatrix):
    """Filled like the plain format; a subclass says in `finish` what becomes of complete rows."""

    def __init__(self, kept: KeptLayers) -> None:
        self._kept = kept

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `weight` and `bias`; remember the dtype that rows are looked up in."""
        super().create_weights(layer, shape, dtype, device)
        vars(layer)["row_dtype"] = dtype

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `KeptLayers.apply`."""
        return self._kept.apply(layer, x, residual=residual, out_dtype=out_dtype)

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `KeptLayers.apply_gated`."""
        return self._kept.apply_gated(layer, x)

    def gated_outputs(self, gate: str) -> int:
        """See `KeptLayers.gated_outputs`."""
        return self._kept.gated_outputs(gate)

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Look the rows up: in the codes, if the matrix is also a head."""
        weight = cast("Tensor | None", layer.weight)
        if weight is None:
            return self._kept.rows(layer, ids)
        if native.extension() is None:
            return super().rows(layer, ids)
        from pagemill.ops import cpu_layers  # it needs the extension

        return cpu_layers.embedding(ids, weight)
