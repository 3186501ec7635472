"""4-bit weights made of plain ones while a checkpoint is loaded (`--quantization int4`).

Groups of 32 inputs share a float16 scale: 4.5 bits a weight. A code stands for one of 16 values that are
not evenly spaced: they have the least squared error on groups of 32 normal numbers, as their scale is
chosen here, and on trained weights a tenth less error than 16 even steps of the same size in memory or
than groups of 64 with a scale and a zero (benchmarks/results.md). Activations stay in the model's dtype.
A layer's rows are rounded slice by slice, straight from the file, as soon as the layer is complete, those
of an embedding that is also the head included. Called by `models.loader`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill import native
from pagemill.ops.packed import TILE, PackedFormat, PackedMatrix, fill
from pagemill.quant.base import LinearShape, NotFiniteError
from pagemill.quant.packed import PackedLayers, keep, parts_of, unfilled_for
from pagemill.quant.waiting import RowSlice, drop_rows, slices
from pagemill.quant.while_loading import QuantizedWhileLoading

GROUP = 32
# Found by going to and fro between the best scales of 6,000 groups of normal numbers and the mean of the
# numbers that each value stands for, until neither moved.
TABLE = (-127, -101, -80, -63, -48, -35, -22, -10, 2, 13, 24, 37, 50, 66, 84, 108)
FORMAT = PackedFormat("int4", GROUP, table=TABLE)
# Sizes of the scale that are tried, with the largest number of a group near either end of the table.
_SIZES = (0.88, 0.95, 1.0, 1.06)
# Elements that are quantized at a time: their codes wait as bytes.
_SLICE_ELEMENTS = 1 << 20


class Int4(QuantizedWhileLoading):
    """Codes of 4 bits and the scales of their groups."""

    def __init__(self) -> None:
        super().__init__(PackedLayers())

    def finish(self, layer: nn.Module) -> None:
        """Quantize the rows of a layer, those that wait straight from the file, and let go of them."""
        shape, weight = cast(LinearShape, layer.shape), cast(Tensor, layer.weight)
        parts = parts_of(shape)
        matrix = unfilled_for(
            FORMAT, shape.out_features, shape.in_features, weight.device, parts=parts
        )
        if not weight.is_meta:
            for rows in slices(layer, parts):
                if not _quantize_rows(rows, matrix):
                    raise NotFiniteError(weight.shape, "int4")
        keep(layer, matrix, weight.dtype)
        drop_rows(layer)


def _quantize_rows(rows: RowSlice, matrix: PackedMatrix) -> bool:
    """Quantize rows into a matrix, some at a time; return whether all numbers were finite."""
    weight = rows.values
    step = max(1, _SLICE_ELEMENTS // (TILE * weight.shape[1])) * TILE
    for start in range(0, len(weight), step):
        codes, scales = quantize(weight[start : start + step])
        if not bool(scales.isfinite().all()):
            return False
        fill(matrix, codes, scales, first_row=rows.start + start, part=rows.part)
    return True


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [rows, in] uint8 and scales [rows, groups] float32 of weight [rows, in].

    A group with a NaN or an infinite number gets a scale that is not finite.
    """
    rows, columns = weight.shape
    module = native.extension()
    if module is None:
        return quantize_in_torch(weight)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // GROUP))
    dtype = {torch.float32: 0, torch.bfloat16: 1}[weight.dtype]
    module.qlinear_quantize(
        weight.data_ptr(), rows, columns, weight.stride(0), dtype, TABLE, codes.data_ptr(),
        scales.data_ptr(),
    )  # fmt: skip
    return codes, scales


def quantize_in_torch(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quantize` does, in plain torch: the same search, sums in another order."""
    rows, columns = weight.shape
    x = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP)).view(-1, GROUP)
    table = torch.tensor(TABLE, dtype=torch.float32)
    middles = (table[1:] + table[:-1]) / 2
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    inverse, best = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    for end in (TABLE[0], TABLE[-1]):
        for size in _SIZES:
            tried = (end * size / largest).masked_fill(largest == 0, 0.0)
            values = table[torch.bucketize(x * tried, middles)]
            xq, qq = (x * values).sum(1, keepdim=True), values.square().sum(1, keepdim=True)
            gain = xq.square() / qq
            better = gain > best
            inverse, best = torch.where(better, tried, inverse), torch.where(better, gain, best)
    codes = torch.bucketize(x * inverse, middles)
    values = table[codes]
    scales = (x * values).sum(1, keepdim=True) / values.square().sum(1, keepdim=True)
    scales = torch.where(x.isfinite().all(1, keepdim=True), scales, torch.nan)
    plain = codes.to(torch.uint8).view(rows, -1)[:, :columns]
    return plain, scales.view(rows, -1)
