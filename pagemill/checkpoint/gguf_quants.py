"""Block formats of GGUF back to float32, vectorized, a cache-sized piece at a time.

Owns one function for each tensor type: it fills the float32 rows of some blocks from their bytes. Besides
the result nothing larger than a piece is allocated. Called by the GGUF checkpoint.
Formats: block_q4_0 ... block_q6_K of ggml (ggml-common.h), super-blocks of 256 for the K types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.checkpoint.gguf_reader import TENSOR_TYPES
from pagemill.errors import CheckpointError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Unpack = Callable[[Bytes, Floats], None]

# Elements of one piece: its bytes, quants and floats stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 16

_SIZES = {name: (block, block_bytes) for name, block, block_bytes in TENSOR_TYPES.values()}


def dequantize(raw: Bytes, type_name: str, shape: tuple[int, ...]) -> Floats:
    """Return the float32 values [shape] of a tensor's bytes.

    `raw` is [size_bytes] uint8 and may be a read-only view of the file; a type without a function raises
    CheckpointError.
    """
    unpack = require_supported(type_name)
    block, block_bytes = _SIZES[type_name]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), dtype=np.float32)
    step = max(1, PIECE_ELEMENTS // block)
    # Damaged scales may be NaN or infinite; that is for the model's own checks, not a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], values[start : start + step])
    return values.reshape(shape)


def require_supported(type_name: str, where: str = "a tensor") -> Unpack:
    """Return the function of a tensor type, or refuse the type by name."""
    unpack = DEQUANTIZERS.get(type_name)
    if unpack is None:
        raise CheckpointError(
            f"{where} has the GGUF tensor type {type_name}, which pagemill does not read; it reads "
            f"{', '.join(DEQUANTIZERS)}. Take a file quantized to one of these, such as Q4_K_M or Q8_0"
        )
    return unpack


def _half(columns: Bytes) -> Floats:
    """Return two byte columns [n, 2] as float16 widened to float32 [n, 1]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, quants: Bytes) -> None:
    """Split bytes [n, g, k] into quants [n, g, 2, k]: all low halves of a group, then its high ones."""
    np.bitwise_and(packed, 15, out=quants[:, :, 0])
    np.right_shift(packed, 4, out=quants[:, :, 1])


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks).view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = np.ascontiguousarray(blocks).view("<u2")
    np.left_shift(bits, 16, out=bits)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks[:, :2])


def _quants4(packed: Bytes) -> Bytes:
    """Return the 4-bit quants [n, 32] of bytes [n, 16]."""
    quants = np.empty((len(packed), 1, 2, 16), dtype=np.uint8)
    _nibbles(packed[:, None], quants)
    return quants.reshape(-1, 32)


def _quants5(high: Bytes, packed: Bytes) -> Bytes:
    """Return the 5-bit quants [n, 32]; bit i of the 4 bytes `high` is the fifth of quant i."""
    quants = _quants4(packed)
    fifth = np.unpackbits(high, axis=1, bitorder="little")  # [n, 32]
    np.left_shift(fifth, 4, out=fifth)
    return np.bitwise_or(quants, fifth, out=quants)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    out[...] = _quants4(blocks[:, 2:])
    out -= 8
    out *= _half(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _quants4(blocks[:, 4:])
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    out[...] = _quants5(blocks[:, 2:6], blocks[:, 6:])
    out -= 16
    out *= _half(blocks[:, :2])


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _quants5(blocks[:, 4:8], blocks[:, 8:])
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack 12 bytes [n, 12] into eight 6-bit scales and eight 6-bit minima, [n, 8] each.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; their top two bits belong to
    numbers 4-7, whose low four bits are the halves of bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, minima


def _apply_scales(blocks: Bytes, out: Floats) -> None:
    """Turn the quants in `out` [n, 256] into values with the scales in the first 16 bytes of blocks."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    groups *= (_half(blocks[:, :2]) * scales.astype(np.float32))[:, :, None]
    groups -= (_half(blocks[:, 2:4]) * minima.astype(np.float32))[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    quants = np.empty((len(blocks), 4, 2, 32), dtype=np.uint8)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), quants)
    out[...] = quants.reshape(-1, 256)
    _apply_scales(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    quants = np.empty((len(blocks), 4, 2, 32), dtype=np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), quants)
    rows = quants.reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for group in range(8):  # bit `group` of high byte i is the fifth of quant i of that group
        rows[:, group] |= ((high >> group) & 1) << 4
    out[...] = rows.reshape(-1, 256)
    _apply_scales(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    quants = np.empty((len(blocks), 2, 2, 64), dtype=np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), quants)
    rows = quants.reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for group in range(4):
        rows[:, :, group] |= ((high >> (2 * group)) & 3) << 4
    out[...] = rows.reshape(-1, 256)
    out -= 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups: NDArray[Any] = out.reshape(-1, 16, 16)
    groups *= (_half(blocks[:, 208:]) * scales)[:, :, None]


DEQUANTIZERS: dict[str, Unpack] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
