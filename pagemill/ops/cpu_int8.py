"""Linear layers over int8 weights on the native kernels: checks, outputs, one call into `pagemill._C`.

The reference is `ops.reference.linear_int8`: sums of codes are exact whole numbers, so that a row of a
result differs from it, if at all, by the rounding of the last steps, and depends on that row of the
input alone. Layouts are explained in csrc/linear_int8. Called by `quant.int8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.ops.cpu import _C, _DTYPES, _EPILOGUES, TILE
from pagemill.ops.kept_results import new_result
from pagemill.ops.reference import PER_ROW, Int8Rounding

_TILE_ROW_BYTES = 64
MAX_IN_FEATURES = 65536  # of exact sums in 32 bits


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int, int]:
    """Return the shape of packed codes, uint8: [tiles of outputs, tiles of inputs, 16, 64]."""
    return (-(-out_features // TILE), -(-in_features // _TILE_ROW_BYTES), TILE, _TILE_ROW_BYTES)


def pack(
    codes: Tensor,
    scales: Tensor,
    packed: Tensor,
    packed_scales: Tensor,
    sums: Tensor | None = None,
    *,
    tile_first: int = 0,
    tile_step: int = 1,
) -> None:
    """Put codes [out, in] int8 and scales [out] float32 into every `tile_step`-th tile of `packed`.

    packed_scales float32 and sums int32, of each row's codes, are [packed rows].
    """
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert codes.stride(1) == 1 or codes.shape[1] == 1, "rows of codes are contiguous"
    assert scales.is_contiguous() and scales.shape == (codes.shape[0],)
    assert sums is None or (sums.dtype == torch.int32 and sums.shape == packed_scales.shape)
    _check_room(codes, packed, packed_scales, tile_first, tile_step)
    _C.pack_int8(
        codes.data_ptr(), *codes.shape, codes.stride(0), scales.data_ptr(), packed.data_ptr(),
        packed_scales.data_ptr(), 0 if sums is None else sums.data_ptr(), tile_first, tile_step,
    )  # fmt: skip


def quantize(
    weight: Tensor,
    packed: Tensor,
    packed_scales: Tensor,
    *,
    tile_first: int = 0,
    tile_step: int = 1,
) -> None:
    """Round weight [out, in] to codes, each row by its largest absolute value, into tiles as `pack`.

    ValueError where a number is not finite.
    """
    assert weight.stride(1) == 1 or weight.shape[1] == 1, "rows of weights are contiguous"
    _check_room(weight, packed, packed_scales, tile_first, tile_step)
    _C.quantize_int8(
        weight.data_ptr(), *weight.shape, weight.stride(0), _DTYPES[weight.dtype],
        packed.data_ptr(), packed_scales.data_ptr(), tile_first, tile_step,
    )  # fmt: skip


def _check_room(
    rows: Tensor, packed: Tensor, packed_scales: Tensor, tile_first: int, tile_step: int
) -> None:
    assert packed.dtype == torch.uint8 and packed_scales.dtype == torch.float32
    assert packed.is_contiguous() and packed_scales.is_contiguous()
    tiles = -(-rows.shape[0] // TILE)
    assert packed.shape[1:] == packed_shape(*rows.shape)[1:]
    assert packed_scales.shape == (packed.shape[0] * TILE,)
    assert tiles == 0 or tile_first + (tiles - 1) * tile_step < packed.shape[0]


def linear_int8_rows(
    ids: Tensor, packed: Tensor, scales: Tensor, sizes: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return rows `ids` [count] int64 of the matrix of `sizes` (out, in), codes times scales."""
    ids = ids.contiguous()  # held until the kernel has read them
    out = torch.empty(ids.shape[0], sizes[1], dtype=dtype)
    _C.linear_int8_rows(
        ids.data_ptr(), ids.shape[0], packed.data_ptr(), scales.data_ptr(), *sizes,
        out.data_ptr(), _DTYPES[dtype],
    )  # fmt: skip
    return out


def linear_int8(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    sums: Tensor | None = None,
    how: Int8Rounding = PER_ROW,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias (+ residual) of x [tokens, in], which becomes codes row by row.

    Everything but the codes is as in `ops.cpu.linear`: with `gate`, tiles are pairs, the result is
    act(gate) * up and bias is [2 * out]; `residual` is added to in place.
    """
    rows, in_features = x.shape
    assert packed.shape[1:] == packed_shape(out_features, in_features)[1:]
    assert len(scales) == len(packed) * TILE
    if x.stride(1) != 1:
        x = x.contiguous()
    out = residual
    if out is None:
        out = new_result(rows, out_features, x.dtype, out_dtype)
    else:
        assert out.shape == (rows, out_features) and out.stride(1) == 1
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    address, stride = out.data_ptr(), out.stride(0)
    rounding = 2 if how.scale is not None else int(how.row_zero_points)
    _C.linear_int8(
        x.data_ptr(), x.stride(0), rows, _DTYPES[x.dtype], rounding, how.scale or 0.0,
        how.zero_point, packed.data_ptr(), scales.data_ptr(),
        0 if sums is None else sums.data_ptr(), out_features, in_features,
        0 if bias is None else bias.data_ptr(), 0 if residual is None else address, stride,
        address, stride, _DTYPES[out.dtype], _EPILOGUES[gate],
    )  # fmt: skip
    return out


def linear_int8_scratch_bytes() -> int:
    """Return the most memory that `linear_int8` keeps of its own."""
    return int(_C.linear_int8_scratch_bytes())
