"""AWQ checkpoints, 4 bits, the "gemm" layout: `qweight`, `qzeros`, `scales`. Lin et al. 2023.

Codes and zero points lie in 32-bit words along the outputs, eight at a time in the order 0 2 4 6 1 3 5 7
from the lowest bits up. Written by AutoAWQ and AutoRound; the layout is AutoAWQ's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.checkpoint.base import Stored
from pagemill.errors import CheckpointError
from pagemill.quant.base import LayerPart
from pagemill.quant.packed import SIGNED_TABLE, UNSIGNED_TABLE, PackedFormat
from pagemill.quant.stored import (
    FLOATS,
    CodeSource,
    MatrixFormat,
    RowCodes,
    SchemeReader,
    Wanted,
    check_group,
    matches,
    nibbles,
    plain,
    whole_row,
)

_PER_WORD = 8
# Which of its eight outputs each 4-bit number of a word belongs to, from the lowest bits up.
_WORD_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQ:
    """One setting for all matrices of the decoder's layers, less those that are named."""

    ignored = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        reader = SchemeReader(config, "awq")
        # Older files spell the keys otherwise.
        spelled = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
        given = {**{k: v for k, v in spelled.items() if v is not None}, **config}
        reader = SchemeReader(given, "awq")
        reader.choice("bits", (4,), None)
        self._group = reader.group_size(given.get("group_size", 128))
        self._symmetric = not reader.flag("zero_point", True)
        version = given.get("version")
        if not isinstance(version, (str, type(None))) or (version or "gemm").lower() != "gemm":
            raise reader.error(
                "version", version, "supported: 'gemm', the layout of AutoAWQ's GEMM"
            )
        self._left_out = reader.names("modules_to_not_convert")

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return the format of a matrix in a decoder layer."""
        name = part.name
        if re.search(r"\.\d+\.", name.plain) is None or matches(name, self._left_out):
            return None
        rows = part.stop - part.start
        if rows % _PER_WORD:
            raise CheckpointError(
                f"{name.plain} has {rows} outputs; AWQ puts {_PER_WORD} into a word, so they must be a "
                f"multiple of {_PER_WORD}"
            )
        return _Words(rows, columns, check_group(name, columns, self._group), self._symmetric)


@dataclass(frozen=True, slots=True)
class _Words:
    """A matrix in the gemm layout."""

    rows: int
    columns: int
    group: int
    symmetric: bool
    reorders = False

    @property
    def packed(self) -> PackedFormat:
        """Return the packed format: zero points that are all 8 go into the codes."""
        group = whole_row(self.columns) if self.group == self.columns else self.group
        if self.symmetric:
            return PackedFormat("int4", group, "none", SIGNED_TABLE)
        return PackedFormat("int4", group, "zero", UNSIGNED_TABLE)

    def wanted(self) -> Mapping[str, Wanted]:
        """Return the three tensors."""
        words, groups = self.rows // _PER_WORD, self.columns // self.group
        return {
            "qweight": Wanted(((self.columns, words),), ("I32",)),
            "qzeros": Wanted(((groups, words),), ("I32",)),
            "scales": Wanted(((groups, self.rows),), FLOATS),
        }

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the codes."""
        zeros = _unpack(plain(waiting, "qzeros"))
        if self.symmetric and not torch.all(zeros == 8):
            raise CheckpointError(
                f"{name}.qzeros holds the zero point {int(zeros[zeros != 8][0])}, but quantization_config "
                "says zero_point false, which means 8. If the zero points are right, set zero_point to "
                "true"
            )
        offsets = None if self.symmetric else zeros.t().float()
        return _WordCodes(plain(waiting, "qweight"), plain(waiting, "scales").float().t(), offsets)


class _WordCodes:
    """Codes in words along the outputs."""

    column_order: Tensor | None = None
    rounding = None

    def __init__(self, words: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        self._words, self._scales, self._offsets = words, scales, offsets

    def rows(self, start: int, stop: int) -> RowCodes:
        first, last = start // _PER_WORD, -(-stop // _PER_WORD)
        codes = _unpack(self._words[:, first:last]).t()
        skipped = start - first * _PER_WORD
        offsets = None if self._offsets is None else self._offsets[start:stop]
        return RowCodes(
            codes[skipped : skipped + stop - start].contiguous(), self._scales[start:stop], offsets
        )


def _unpack(words: Tensor) -> Tensor:
    """Return the numbers of words [n, words], in the order of outputs: [n, 8 words] uint8."""
    numbers = nibbles(words).view(-1, _PER_WORD)
    ordered = torch.empty_like(numbers)
    ordered[:, list(_WORD_ORDER)] = numbers
    return ordered.view(words.shape[0], -1)
