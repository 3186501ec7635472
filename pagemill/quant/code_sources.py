"""Codes of a matrix that no file has as they are: sizes alone, made-up ones, rows in another order.

Each is a `stored.CodeSource`; `repacked` packs them like a file's. Here too: how many rows are unpacked
at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.quant.base import RandomWeights
from pagemill.quant.packed import PackedFormat
from pagemill.quant.stored import CodeSource, RoundedFormat, RowCodes, whole_row

TILE = 16
# Codes that are unpacked at a time on their way into a packed matrix.
_SLICE_ELEMENTS = 1 << 21


class SizedCodes:
    """Stands for the codes of a matrix where sizes are all that is wanted."""

    rounding = None

    def __init__(self, order: Tensor | None) -> None:
        self.column_order = order

    def rows(self, start: int, stop: int) -> RowCodes:
        """Raise: nobody asks."""
        raise AssertionError("there are no codes on the meta device")


class RearrangedCodes:
    """Codes whose rows come in another order than the matrix's."""

    def __init__(self, source: CodeSource, order: Tensor) -> None:
        self.column_order, self.rounding = source.column_order, source.rounding
        self._source = source
        self._order = order

    def rows(self, start: int, stop: int) -> RowCodes:
        """Return rows start:stop in the new order."""
        picked = [self._source.rows(int(row), int(row) + 1) for row in self._order[start:stop]]
        offsets = [rows.offsets for rows in picked if rows.offsets is not None]
        return RowCodes(
            torch.cat([rows.codes for rows in picked]),
            torch.cat([rows.scales for rows in picked]),
            torch.cat(offsets) if offsets else None,
        )


class RandomCodes:
    """Made-up codes of a plausible size: one slice of rows, over and over."""

    column_order: Tensor | None = None
    rounding = None

    def __init__(
        self, form: PackedFormat | RoundedFormat, columns: int, weights: RandomWeights
    ) -> None:
        count = rows_at_a_time(columns)
        if isinstance(form, RoundedFormat):
            form = PackedFormat("int8", whole_row(columns))
        numbers = torch.empty(count, columns)
        weights.fill(numbers, 1.0)
        largest = {"int4": 7.5, "int8": 127.0, "fp8": 448.0}[form.codec]
        groups = -(-columns // form.group)
        if form.codec == "fp8":
            self._codes = numbers.mul_(largest).to(torch.float8_e4m3fn).view(torch.uint8)
        elif form.codec == "int8":
            self._codes = numbers.mul_(largest).round_().to(torch.int8)
        else:
            self._codes = numbers.add_(1.0).mul_(largest).round_().to(torch.uint8)
        scale = (3.0 / columns) ** 0.5 / largest
        self._scales = torch.full((count, groups), scale)
        self._offsets = None
        if form.offset != "none":
            middle = largest if form.codec == "int4" and 15 in form.table else 0.0
            offset = middle if form.offset == "zero" else -middle * scale
            self._offsets = torch.full((count, groups), offset)

    def rows(self, start: int, stop: int) -> RowCodes:
        """Return as many rows as start:stop, some of them alike."""
        picked = torch.arange(start, stop) % len(self._codes)
        offsets = None if self._offsets is None else self._offsets[picked]
        return RowCodes(self._codes[picked], self._scales[picked], offsets)


def rows_at_a_time(columns: int) -> int:
    """Return how many rows, whole tiles, are unpacked at a time."""
    return max(1, _SLICE_ELEMENTS // max(1, columns) // TILE) * TILE
