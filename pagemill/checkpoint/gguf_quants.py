"""Block formats of GGUF taken apart: codes, scales and minima, or float32 values. Vectorized.

A weight is (code - zero) * scale + minimum, with one scale (and minimum) for each group of codes; the
products of the formats' own factors (a super-block's scale times a group's) are float32, as the format
defines them. Owns one function for each tensor type. Called by the GGUF checkpoint and, through its
tensors, by the weight formats that keep codes. What is made at once is a piece that stays in a core's
second-level cache, besides the result.
Formats: block_q4_0 ... block_q6_K of ggml (ggml-common.h), super-blocks of 256 for the K types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.checkpoint.gguf_reader import TENSOR_TYPES
from pagemill.errors import CheckpointError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Elements of one piece: its bytes, codes and floats stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 16

_SIZES = {name: (block, block_bytes) for name, block, block_bytes in TENSOR_TYPES.values()}


class Codes(NamedTuple):
    """Some blocks taken apart."""

    codes: NDArray[Any]  # [blocks, elements]: uint8 of 4 bits, or int8 with the zero subtracted
    scales: Floats  # [blocks, groups]
    minima: Floats | None  # [blocks, groups]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type whose weights are codes."""

    bits: int  # 4: codes are 0 to 15; 8: codes are int8
    zero: int  # what a code of 4 bits must have subtracted; 0 with int8
    group: int  # codes that share a scale
    has_minima: bool
    take_apart: Callable[[Bytes], Codes]


def dequantize(raw: Bytes, type_name: str, shape: tuple[int, ...]) -> Floats:
    """Return the float32 values [shape] of a tensor's bytes.

    `raw` is [size_bytes] uint8 and may be a read-only view of the file; a type without a function raises
    CheckpointError.
    """
    require_supported(type_name)
    block, block_bytes = _SIZES[type_name]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), dtype=np.float32)
    step = max(1, PIECE_ELEMENTS // block)
    unpack = _PLAIN.get(type_name) or _unpack(BLOCK_FORMATS[type_name])
    # Damaged scales may be NaN or infinite; that is for the model's own checks, not a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], values[start : start + step])
    return values.reshape(shape)


def take_apart(raw: Bytes, type_name: str) -> Codes:
    """Return the codes of rows [rows, row_bytes]: codes [rows, columns], scales [rows, groups]."""
    block, block_bytes = _SIZES[type_name]
    kind = BLOCK_FORMATS[type_name]
    rows, row_bytes = raw.shape
    columns = row_bytes // block_bytes * block
    codes = np.empty((rows, columns), dtype=np.uint8 if kind.bits == 4 else np.int8)
    scales = np.empty((rows, columns // kind.group), dtype=np.float32)
    minima = np.empty_like(scales) if kind.has_minima else None
    step = max(1, PIECE_ELEMENTS // max(1, columns))
    with np.errstate(all="ignore"):
        for start in range(0, rows, step):
            piece = slice(start, min(start + step, rows))
            parts = kind.take_apart(raw[piece].reshape(-1, block_bytes))
            codes[piece] = parts.codes.reshape(-1, columns)
            scales[piece] = parts.scales.reshape(-1, columns // kind.group)
            if minima is not None and parts.minima is not None:
                minima[piece] = parts.minima.reshape(-1, columns // kind.group)
    return Codes(codes, scales, minima)


def require_supported(type_name: str, where: str = "a tensor") -> None:
    """Refuse a tensor type that is not read, by its name."""
    if type_name not in READABLE:
        raise CheckpointError(
            f"{where} has the GGUF tensor type {type_name}, which pagemill does not read; it reads "
            f"{', '.join(READABLE)}. Take a file quantized to one of these, such as Q4_K_M or Q8_0"
        )


def _unpack(kind: BlockFormat) -> Callable[[Bytes, Floats], None]:
    def unpack(blocks: Bytes, out: Floats) -> None:
        parts = kind.take_apart(blocks)
        out[...] = parts.codes
        if kind.zero:
            out -= kind.zero
        groups: NDArray[Any] = out.reshape(len(blocks), -1, kind.group)
        groups *= parts.scales[:, :, None]
        if parts.minima is not None:
            groups += parts.minima[:, :, None]

    return unpack


# ---------------------------------------------------------------- plain numbers


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks).view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = np.ascontiguousarray(blocks).view("<u2")
    np.left_shift(bits, 16, out=bits)


# ---------------------------------------------------------------- codes


def _half(columns: Bytes) -> Floats:
    """Return two byte columns [n, 2] as float16 widened to float32 [n, 1]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, codes: Bytes) -> None:
    """Split bytes [n, g, k] into codes [n, g, 2, k]: all low halves of a group, then its high ones."""
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])


def _codes4(packed: Bytes) -> Bytes:
    """Return the 4-bit codes [n, 32] of bytes [n, 16]."""
    codes = np.empty((len(packed), 1, 2, 16), dtype=np.uint8)
    _nibbles(packed[:, None], codes)
    return codes.reshape(-1, 32)


def _codes5(high: Bytes, packed: Bytes) -> Bytes:
    """Return the 5-bit codes [n, 32]; bit i of the 4 bytes `high` is the fifth of code i."""
    codes = _codes4(packed)
    fifth = np.unpackbits(high, axis=1, bitorder="little")  # [n, 32]
    np.left_shift(fifth, 4, out=fifth)
    return np.bitwise_or(codes, fifth, out=codes)


def _signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    """Return codes of at most 7 bits as int8, `zero` subtracted; the memory is the codes' own."""
    signed = codes.view(np.int8)
    signed -= zero
    return signed


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), None)


def _q4_0(blocks: Bytes) -> Codes:
    return Codes(_codes4(blocks[:, 2:]), _half(blocks[:, :2]), None)


def _q4_1(blocks: Bytes) -> Codes:
    return Codes(_codes4(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Codes:
    codes = _codes5(blocks[:, 2:6], blocks[:, 6:])
    return Codes(_signed(codes, 16), _half(blocks[:, :2]), None)


def _q5_1(blocks: Bytes) -> Codes:
    codes = _codes5(blocks[:, 4:8], blocks[:, 8:])
    return Codes(_signed(codes, 0), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the eight scales and minima [n, 8] of super-blocks that begin with d, dmin and 12 bytes.

    Bytes 0-3 and 4-7 of the 12 hold scales and minima 0-3 in their low six bits; their top two bits
    belong to numbers 4-7, whose low four bits are the halves of bytes 8-11. Minima are subtracted.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return (
        _half(blocks[:, :2]) * scales.astype(np.float32),
        -(_half(blocks[:, 2:4]) * minima.astype(np.float32)),
    )


def _q4_k(blocks: Bytes) -> Codes:
    codes = np.empty((len(blocks), 4, 2, 32), dtype=np.uint8)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), codes)
    return Codes(codes.reshape(-1, 256), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> Codes:
    codes = np.empty((len(blocks), 4, 2, 32), dtype=np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), codes)
    rows = codes.reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for group in range(8):  # bit `group` of high byte i is the fifth of code i of that group
        rows[:, group] |= ((high >> group) & 1) << 4
    return Codes(_signed(codes.reshape(-1, 256), 0), *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> Codes:
    codes = np.empty((len(blocks), 2, 2, 64), dtype=np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), codes)
    rows = codes.reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for group in range(4):
        rows[:, :, group] |= ((high >> (2 * group)) & 3) << 4
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Codes(_signed(codes.reshape(-1, 256), 32), scales, None)


_PLAIN: dict[str, Callable[[Bytes, Floats], None]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(8, 0, 32, False, _q8_0),
    "Q4_0": BlockFormat(4, 8, 32, False, _q4_0),
    "Q4_1": BlockFormat(4, 0, 32, True, _q4_1),
    "Q5_0": BlockFormat(8, 0, 32, False, _q5_0),
    "Q5_1": BlockFormat(8, 0, 32, True, _q5_1),
    "Q4_K": BlockFormat(4, 0, 32, True, _q4_k),
    "Q5_K": BlockFormat(8, 0, 32, True, _q5_k),
    "Q6_K": BlockFormat(8, 0, 16, False, _q6_k),
}
READABLE = (*_PLAIN, *BLOCK_FORMATS)
