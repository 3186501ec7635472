"""The operations of a decoder on the native kernels: checks, outputs, and one call into `pagemill._C`.

Each has the name and meaning of its reference in `ops.reference`, and differs from it by rounding
alone: sums are float32 and rounded once at the end. A row of a result depends on that row of the input
alone, to the bit, whatever the number of rows and threads. Called by `quant` where the extension is
built; layouts are explained in csrc/.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill import native
from pagemill.ops.kept_results import new_result

# torch is imported above, so that the extension finds its OpenMP library in the process.
_C = native.required()

TILE = 16  # output features of a packed tile
_TILE_ROW_BYTES = 64
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# What the kernel can do to pairs of gate and up before it stores them.
_EPILOGUES = {None: 0, "silu": 1, "swish": 1, "gelu_pytorch_tanh": 2}


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of packed weights: [tiles of outputs, tiles of inputs, 16, 64 bytes]."""
    depth = _TILE_ROW_BYTES // dtype.itemsize
    return (-(-out_features // TILE), -(-in_features // depth), TILE, depth)


def fuses_gate(activation: str) -> bool:
    """Return whether `linear` can end with act(gate) * up for this activation."""
    return activation in _EPILOGUES


def touch_tiles(packed: Tensor, *, grain: int = 1) -> None:
    """Give each page of fresh, zeroed tiles to the thread that will read it; gated ones have grain 2."""
    assert packed.is_contiguous()
    tiles, k_tiles, _, depth = packed.shape
    _C.touch_tiles(packed.data_ptr(), tiles, k_tiles * depth, grain, _DTYPES[packed.dtype])


def pack_linear(weight: Tensor, packed: Tensor, *, tile_first: int = 0, tile_step: int = 1) -> None:
    """Copy weight [out, in] into every `tile_step`-th tile of `packed`, from tile_first on.

    A step of 2 interleaves a gate and an up projection, which a gated epilogue wants.
    """
    assert weight.dtype == packed.dtype and weight.device.type == packed.device.type == "cpu"
    assert weight.stride(1) == 1 or weight.shape[1] == 1, "rows of weights are contiguous"
    assert packed.is_contiguous()
    rows, k = weight.shape
    tiles = -(-rows // TILE)
    assert packed.shape[1:] == packed_shape(rows, k, weight.dtype)[1:]
    assert tiles == 0 or tile_first + (tiles - 1) * tile_step < packed.shape[0]
    _C.pack_linear(
        weight.data_ptr(), rows, k, weight.stride(0), packed.data_ptr(), tile_first, tile_step,
        _DTYPES[weight.dtype],
    )  # fmt: skip


def linear_rows(ids: Tensor, packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """Return rows `ids` [count] int64 of the packed matrix, [count, in]: an embedding lookup."""
    ids = ids.contiguous()  # held until the kernel has read them
    out = torch.empty(ids.shape[0], in_features, dtype=packed.dtype)
    _C.linear_rows(
        ids.data_ptr(), ids.shape[0], packed.data_ptr(), out_features, in_features,
        out.data_ptr(), _DTYPES[packed.dtype],
    )  # fmt: skip
    return out


def linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias (+ residual) of x [tokens, in]; sums are float32, rounded once.

    With `gate` the packed rows are pairs of tiles (gate, up), the result is act(gate) * up and bias is
    [2 * out]. The sum goes into `residual` [tokens, out] itself where one is given.
    """
    rows, in_features = x.shape
    dtype = _DTYPES[x.dtype]
    assert x.dtype == packed.dtype and packed.shape[1:] == _k_shape(in_features, x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = residual
    if out is None:
        out = new_result(rows, out_features, x.dtype, out_dtype)
    else:
        assert out.shape == (rows, out_features) and out.stride(1) == 1
    bias_address = 0
    if bias is not None:
        assert bias.dtype == x.dtype and bias.is_contiguous()
        bias_address = bias.data_ptr()
    address, stride = out.data_ptr(), out.stride(0)
    _C.linear(
        x.data_ptr(), x.stride(0), rows, packed.data_ptr(), out_features, in_features, dtype,
        bias_address, address if residual is not None else 0, stride, address, stride,
        _DTYPES[out.dtype], _EPILOGUES[gate],
    )  # fmt: skip
    return out


def _k_shape(in_features: int, dtype: torch.dtype) -> tuple[int, int, int]:
    depth = _TILE_ROW_BYTES // dtype.itemsize
    return (-(-in_features // depth), TILE, depth)


def linear_scratch_bytes() -> int:
    """Return the most memory that `linear` keeps of its own."""
    return int(_C.linear_scratch_bytes())
