"""Grouped weight-only formats: the packed matrix, its layout, and its plain-torch arithmetic.

A weight is `scale * code`, `scale * code + min` or `scale * (code - zero)`. Codes are 4-bit numbers of a
table of 16 whole numbers, signed bytes, or float8 e4m3 bytes; `group` inputs of an output share a
scale. Scale, min and zero are float16; `multiplier`, float32 and one an output, times all of an
output's scales and mins, so that float16 neither overflows nor vanishes and one scale a row is exact.

Layout: tiles of 16 outputs x 32 inputs, a tile in lines of 64 bytes. A line holds 16 little-endian
32-bit words, one an output. Its low half-word holds the codes of even inputs and the high one those of
odd inputs, rising from the lowest bit: a 4-bit line spans 8 inputs, an 8-bit line 4. Of a fused gate and
up projection the tiles alternate (`parts` = 2).

    codes        [tiles, inputs / 32, 4 or 8 lines, 64] uint8
    scales       [tiles, groups, 16] float16
    offsets      [tiles, groups, 16] float16: mins or zeros
    multipliers  [tiles, 16] float32

Padding (rows up to 16 and inputs up to 32) has code 0, scale 0 and multiplier 0. Owned here: the record,
filling it from plain codes, and `ReferenceProduct`, the oracle of `ops.cpu_quant`. Called by `quant`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill import native

TILE = 16  # outputs of a tile
DEPTH = 32  # inputs of a tile
LINE = 64  # bytes of a line
CODECS = {"int4": 4, "int8": 8, "fp8": 8}  # name -> bits of a code
OFFSETS = ("none", "min", "zero")
# Codes of signed 4-bit numbers with the zero point 8 folded in (GGUF's Q4_0, GPTQ's symmetric form).
SIGNED_TABLE = tuple(range(-8, 8))
UNSIGNED_TABLE = tuple(range(16))
# What a product can do to pairs of gate and up, by the names of activations.
FUSED_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Elements that the plain-torch code widens at a time.
_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the numbers of a packed matrix are to be read."""

    codec: str  # key of CODECS
    group: int  # inputs that share a scale: 16, a multiple of 32, or all of them
    offset: str = "none"  # one of OFFSETS
    table: tuple[int, ...] = ()  # int4: the value of each of 16 codes, from -128 to 127

    def __post_init__(self) -> None:
        assert self.codec in CODECS, f"no codec {self.codec!r}"
        assert self.offset in OFFSETS, f"no kind of offset {self.offset!r}"
        assert self.group >= 16, f"groups of {self.group}"
        assert len(self.table) == (16 if self.codec == "int4" else 0), "int4 alone has a table"
        assert all(-128 <= value <= 127 for value in self.table), "values are signed bytes"

    @property
    def code_bits(self) -> int:
        """Return the bits of one code."""
        return CODECS[self.codec]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [out_features, in_features] in tiles; see the module for layout and meaning."""

    format: PackedFormat
    out_features: int  # of all parts together
    in_features: int
    parts: int  # matrices whose tiles alternate: 2 for a fused gate and up, else 1
    codes: Tensor  # [tiles, k_tiles, lines, 64] uint8
    scales: Tensor  # [tiles, groups, 16] float16
    offsets: Tensor | None  # [tiles, groups, 16] float16, or None without offsets
    multipliers: Tensor  # [tiles, 16] float32

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names under which a layer keeps them."""
        found = {"codes": self.codes, "scales": self.scales, "multipliers": self.multipliers}
        if self.offsets is not None:
            found["offsets"] = self.offsets
        return found

    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def dequantize(self) -> Tensor:
        """Return the weights [out_features, in_features] float32; of a fused gate, the gate first."""
        order = _tile_order(len(self.codes), self.parts)
        rows = self.out_features // self.parts
        tiles_each = len(self.codes) // self.parts
        wide = torch.empty(len(order) * TILE, self.in_features)
        step = max(1, _SLICE_ELEMENTS // (TILE * DEPTH * self.codes.shape[1]))
        for start in range(0, len(order), step):
            part = order[start : start + step]
            wide[start * TILE : (start + len(part)) * TILE] = self.dequantize_tiles(part)
        pieces = [
            wide[i * tiles_each * TILE : i * tiles_each * TILE + rows] for i in range(self.parts)
        ]
        return pieces[0] if self.parts == 1 else torch.cat(pieces)

    def dequantize_tiles(self, tiles: Tensor) -> Tensor:
        """Return the rows of the tiles [count] int64 as they lie: [count * 16, in_features] float32."""
        values = _values(self.format, _spread(self.codes[tiles], self.format.code_bits))
        columns = values.shape[1]
        group = columns if self.scales.shape[1] == 1 else self.format.group

        def per_input(numbers: Tensor) -> Tensor:
            rows = numbers[tiles].transpose(1, 2).reshape(-1, numbers.shape[1]).float()
            return rows.repeat_interleave(group, 1)[:, :columns]

        if self.offsets is None:
            values *= per_input(self.scales)
        elif self.format.offset == "zero":
            values = values.sub_(per_input(self.offsets)).mul_(per_input(self.scales))
        else:
            values = values.mul_(per_input(self.scales)).add_(per_input(self.offsets))
        values *= self.multipliers[tiles].reshape(-1, 1)
        return values[:, : self.in_features]


def unfilled(
    form: PackedFormat,
    out_features: int,
    in_features: int,
    allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    *,
    parts: int = 1,
) -> PackedMatrix:
    """Return a matrix over tensors of `allocate(shape, dtype)`, which must be zero (or meta)."""
    assert out_features % parts == 0
    tiles = -(-(out_features // parts) // TILE) * parts
    k_tiles = -(-in_features // DEPTH)
    lines = DEPTH * TILE * form.code_bits // 8 // LINE
    groups = num_groups(form.group, in_features)
    numbers = (tiles, groups, TILE)
    return PackedMatrix(
        form,
        out_features,
        in_features,
        parts,
        allocate((tiles, k_tiles, lines, LINE), torch.uint8),
        allocate(numbers, torch.float16),
        None if form.offset == "none" else allocate(numbers, torch.float16),
        allocate((tiles, TILE), torch.float32),
    )


def num_groups(group: int, in_features: int) -> int:
    """Return the scales of an output, those of padding to whole tiles included."""
    if group >= in_features:
        return 1
    return -(-(-(-in_features // DEPTH) * DEPTH) // group)


def pack(
    codes: Tensor,
    scales: Tensor,
    *,
    codec: str,
    group: int,
    mins: Tensor | None = None,
    zeros: Tensor | None = None,
    table: tuple[int, ...] = SIGNED_TABLE,
) -> PackedMatrix:
    """Return plain codes as a packed matrix.

    codes [out, in]: uint8 0..15 (int4), int8 (int8), or float8_e4m3fn or its bytes as uint8 (fp8);
    scales [out, groups] float: one for every `group` inputs, the last group may be shorter; mins or
    zeros of the same shape, if any. `table` counts for int4 only.
    """
    offset = "min" if mins is not None else "zero" if zeros is not None else "none"
    form = PackedFormat(codec, group, offset, table if codec == "int4" else ())
    rows, columns = codes.shape
    matrix = unfilled(form, rows, columns, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    fill(matrix, codes, scales, mins=mins, zeros=zeros)
    return matrix


def fill(
    matrix: PackedMatrix,
    codes: Tensor,
    scales: Tensor,
    *,
    mins: Tensor | None = None,
    zeros: Tensor | None = None,
    first_row: int = 0,
    part: int = 0,
) -> None:
    """Write rows first_row.. (a multiple of 16) of one part; arguments as for `pack`, whole rows.

    Scales that float16 holds are kept as they are; others are rounded to it relative to a power of two
    of their row's largest. One scale a row without a min is kept in float32. A row whose scales, mins or codes are not finite becomes NaN.
    """
    assert first_row % TILE == 0 and codes.shape[1] == matrix.in_features
    form, rows = matrix.format, codes.shape[0]
    tiles = -(-rows // TILE)
    given = mins if form.offset == "min" else zeros
    assert (given is None) == (form.offset == "none")
    first = first_row // TILE * matrix.parts + part
    where = slice(first, first + (tiles - 1) * matrix.parts + 1, matrix.parts)
    if not rows:
        return
    plain = codes.view(torch.uint8)
    multipliers, numbers, offsets = _relative(form.offset, scales.float(), given)
    if form.codec == "fp8":
        no_number = (plain & 0x7F) == 0x7F
        multipliers = multipliers.masked_fill(no_number.any(1), torch.nan)
        plain = plain.masked_fill(no_number, 0)
    _write_codes(matrix, plain, first)
    matrix.scales[where] = _in_tiles(numbers, matrix.scales.shape[1])
    if offsets is not None:
        assert matrix.offsets is not None
        matrix.offsets[where] = _in_tiles(offsets, matrix.scales.shape[1])
    matrix.multipliers[where] = _in_tiles(multipliers[:, None], 1)[:, 0].float()


def _write_codes(matrix: PackedMatrix, plain: Tensor, first: int) -> None:
    """Write plain codes [rows, in] uint8 into every parts-th tile from `first` on."""
    bits, rows = matrix.format.code_bits, len(plain)
    module = native.extension()
    if module is None:
        tiles = -(-rows // TILE)
        where = slice(first, first + (tiles - 1) * matrix.parts + 1, matrix.parts)
        matrix.codes[where] = _gather(plain, bits, matrix.codes.shape[1])
        return
    plain = plain if plain.stride(1) == 1 else plain.contiguous()
    module.qlinear_pack(
        plain.data_ptr(), rows, plain.shape[1], plain.stride(0), bits, matrix.codes.data_ptr(),
        first, matrix.parts,
    )  # fmt: skip


def _relative(
    kind: str, scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return multipliers [out] float32, and scales and offsets as they are stored, float32."""
    mins = None if offsets is None or kind == "zero" else offsets.float()
    zeros = None if offsets is None or kind == "min" else offsets.float()
    if scales.shape[1] == 1 and mins is None:
        return scales[:, 0].clone(), torch.ones_like(scales), zeros
    both = scales if mins is None else torch.cat((scales, mins), 1)
    largest = both.abs().amax(1)
    broken = ~largest.isfinite()
    exponent = torch.frexp(largest)[1].clamp(-120, 120)
    multipliers = torch.ldexp(torch.ones_like(largest), exponent)
    exact = (both.half().float() == both).all(1)
    multipliers[exact | (largest == 0)] = 1.0
    scales = (scales / multipliers[:, None]).masked_fill(broken[:, None], 0.0)
    if mins is not None:
        mins = (mins / multipliers[:, None]).masked_fill(broken[:, None], 0.0)
    multipliers[broken] = torch.nan
    return multipliers, scales, mins if zeros is None else zeros


def _in_tiles(numbers: Tensor, groups: int) -> Tensor:
    """Return [rows, n] as [tiles, groups, 16] float32, zeros where there is nothing."""
    rows, given = numbers.shape
    padded = F.pad(numbers, (0, groups - given, 0, -rows % TILE))
    return padded.view(-1, TILE, groups).transpose(1, 2)


def _gather(codes: Tensor, bits: int, k_tiles: int) -> Tensor:
    """Return plain codes [rows, in] uint8 as [tiles, k_tiles, lines, 64]."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, k_tiles * DEPTH - columns, 0, -rows % TILE))
    if bits == 8:
        # input 4 line + 2 step + half lies at byte 2 half + step
        spread = padded.view(-1, TILE, k_tiles, 8, 2, 2).permute(0, 2, 3, 1, 5, 4)
        return spread.reshape(-1, k_tiles, 8, LINE)
    # input 8 line + 4 high + 2 nibble + half lies at byte 2 half + high
    spread = padded.view(-1, TILE, k_tiles, 4, 2, 2, 2).permute(0, 2, 3, 1, 6, 4, 5)
    return (spread[..., 0] | (spread[..., 1] << 4)).reshape(-1, k_tiles, 4, LINE)


def _spread(codes: Tensor, bits: int) -> Tensor:
    """Return the inverse of `_gather`: [tiles * 16, k_tiles * 32] uint8."""
    tiles, k_tiles = codes.shape[:2]
    if bits == 8:
        plain = codes.view(tiles, k_tiles, 8, TILE, 2, 2).permute(0, 3, 1, 2, 5, 4)
    else:
        words = codes.view(tiles, k_tiles, 4, TILE, 2, 2)
        nibbles = torch.stack((words & 15, words >> 4), -1)
        plain = nibbles.permute(0, 3, 1, 2, 5, 6, 4)
    return plain.reshape(tiles * TILE, k_tiles * DEPTH)


def _values(form: PackedFormat, codes: Tensor) -> Tensor:
    """Return the numbers that codes [rows, in] uint8 stand for, float32."""
    if form.codec == "int4":
        return torch.tensor(form.table, dtype=torch.float32)[codes.int()]
    if form.codec == "int8":
        return codes.view(torch.int8).float()
    return codes.view(torch.float8_e4m3fn).float()


def _tile_order(tiles: int, parts: int) -> Tensor:
    """Return the tiles in the order of the matrix's rows: those of part 0, then those of part 1."""
    return torch.arange(tiles).view(-1, parts).t().reshape(-1)


class Product(Protocol):
    """A packed matrix, and what can be done with it. Rows of results depend on no other rows."""

    matrix: PackedMatrix

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: str | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return x @ weights.T + bias (+ residual) of x [tokens, in]; float32 sums, rounded once.

        With `gate`, a key of FUSED_GATES, the matrix has two parts and the result is act(gate) * up,
        half as many features. The result goes into `residual` [tokens, out] where one is given, into
        `out` [tokens, out] where that is (either may be columns of a wider tensor), else into a new
        tensor of `out_dtype` (x's without one). bias [out_features] has x's dtype.
        """
        ...

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weights[ids] for ids [count] int64, [count, in_features]: a fresh tensor."""
        ...


class ReferenceProduct:
    """The product in plain torch: weights are widened to float32 anew for every call."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: str | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply in float32, a slice of outputs at a time."""
        sums = self._sums(x.float())
        if bias is not None:
            sums += bias.float()
        if gate is not None:
            assert self.matrix.parts == 2
            gates, ups = sums.chunk(2, 1)
            sums = FUSED_GATES[gate](gates).mul_(ups)
        if residual is not None:
            return residual.copy_(sums.add_(residual.float()))
        if out is not None:
            return out.copy_(sums)
        return sums.to(out_dtype or x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Widen the tiles of the rows asked for."""
        assert self.matrix.parts == 1
        wide = self.matrix.dequantize_tiles(ids // TILE).view(-1, TILE, self.matrix.in_features)
        return wide[torch.arange(len(ids)), ids % TILE].to(dtype)

    def _sums(self, x: Tensor) -> Tensor:
        """Return x @ weights.T [tokens, out_features] float32."""
        matrix = self.matrix
        order = _tile_order(len(matrix.codes), matrix.parts)
        wide = torch.empty(len(x), len(order) * TILE)
        step = max(1, _SLICE_ELEMENTS // (TILE * DEPTH * matrix.codes.shape[1]))
        for start in range(0, len(order), step):
            part = order[start : start + step]
            columns = slice(start * TILE, (start + len(part)) * TILE)
            torch.matmul(x, matrix.dequantize_tiles(part).t(), out=wide[:, columns])
        rows, each = matrix.out_features // matrix.parts, wide.shape[1] // matrix.parts
        return torch.cat([wide[:, i * each : i * each + rows] for i in range(matrix.parts)], 1)
