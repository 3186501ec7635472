"""GPTQ checkpoints, 4 and 8 bits: `qweight`, `qzeros`, `scales`, `g_idx`. Frantar et al. 2022.

Codes lie in 32-bit words along the inputs, zero points along the outputs. `checkpoint_format` "gptq"
(the usual one) stores zero points less one, "gptq_v2" as they are. With `desc_act` a column's group
is `g_idx`: the columns are sorted by group when they are packed, and the inputs are gathered
accordingly. Written by AutoGPTQ, GPTQModel and AutoRound; the layout is theirs.
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
from pagemill.quant.base import LayerPart, ModuleName
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
    plain,
    unpack_words,
    whole_row,
)


class GPTQ:
    """One setting for all matrices of the decoder's layers, less those that rules leave out."""

    ignored = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        reader = SchemeReader(config, "gptq")
        self._bits = reader.choice("bits", (4, 8), None, "; 2 and 3 bits have no packed format")
        self._group = reader.group_size(config.get("group_size", 128))
        self._symmetric = reader.flag("sym", True)
        self._reorders = reader.flag("desc_act", False) and self._group != -1
        written = reader.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self._less_one = written == "gptq"
        self._head = reader.flag("lm_head", False)
        self._left_out = reader.names("modules_to_not_convert", "modules_in_block_to_not_quantize")
        self._rules = _read_rules(reader)

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return the format of a matrix in a decoder layer, and of the head if it is quantized."""
        name = part.name
        if not (_in_a_layer(name) or (self._head and name.ends_in("lm_head"))):
            return None
        if matches(name, self._left_out) or any(_matches_rule(name, rule) for rule in self._rules):
            return None
        group = check_group(name, columns, self._group)
        rows = part.stop - part.start
        _check_words(name, rows, columns, 32 // self._bits)
        return _Words(
            rows, columns, self._bits, group, self._symmetric, self._reorders, self._less_one
        )


def _in_a_layer(name: ModuleName) -> bool:
    return re.search(r"\.\d+\.", name.plain) is not None


def _read_rules(reader: SchemeReader) -> list[str]:
    """Return the patterns of `dynamic` that leave modules out ("-:..."); others are refused."""
    rules = reader.config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise reader.error("dynamic", rules, "it must map patterns of modules to settings")
    for pattern in rules:
        if not isinstance(pattern, str) or not pattern.startswith("-:"):
            raise reader.error(
                "dynamic", pattern, "only rules that leave modules out ('-:...') are supported"
            )
    return [pattern[2:] for pattern in rules]


def _matches_rule(name: ModuleName, rule: str) -> bool:
    return matches(name, [f"re:{rule}"])


def _check_words(name: ModuleName, rows: int, columns: int, per_word: int) -> None:
    for size, what in ((rows, "outputs"), (columns, "inputs")):
        if size % per_word:
            raise CheckpointError(
                f"{name.plain} has {size} {what}; {per_word} codes of this quantization fill a 32-bit "
                f"word, so they must be a multiple of {per_word}"
            )


@dataclass(frozen=True, slots=True)
class _Words:
    """A matrix in GPTQ's layout."""

    rows: int
    columns: int
    bits: int
    group: int
    symmetric: bool
    reorders: bool
    less_one: bool

    @property
    def packed(self) -> PackedFormat:
        """Return the packed format: zero points that are all in the middle go into the codes."""
        group = whole_row(self.columns) if self.group == self.columns else self.group
        offset = "none" if self.symmetric else "zero"
        if self.bits == 8:
            return PackedFormat("int8", group, offset)
        table = SIGNED_TABLE if self.symmetric else UNSIGNED_TABLE
        return PackedFormat("int4", group, offset, table)

    def wanted(self) -> Mapping[str, Wanted]:
        """Return the four tensors; where columns are not reordered, g_idx says nothing new."""
        per_word, groups = 32 // self.bits, self.columns // self.group
        in_order = not self.reorders or groups == 1
        return {
            "qweight": Wanted(((self.columns // per_word, self.rows),), ("I32",)),
            "qzeros": Wanted(((groups, self.rows // per_word),), ("I32",)),
            "scales": Wanted(((groups, self.rows),), FLOATS),
            "g_idx": Wanted(((self.columns,),), ("I32", "I64"), optional=in_order),
        }

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the codes, their columns sorted by group."""
        zeros = unpack_words(self._zero_words(plain(waiting, "qzeros")), self.bits)
        middle = 1 << (self.bits - 1)
        if self.symmetric and not torch.all(zeros == middle):
            odd = zeros[zeros != middle][0]
            written = "gptq" if self.less_one else "gptq_v2"
            raise CheckpointError(
                f"{name}.qzeros holds the zero point {int(odd)}, but quantization_config says sym, which "
                f"means {middle}. If the zero points are right, set sym to false; they were read as "
                f"checkpoint_format {written!r}"
            )
        order = None
        if "g_idx" in waiting:
            order = columns_by_group(plain(waiting, "g_idx"), self.columns, self.group, name)
        scales = plain(waiting, "scales").float().t()
        offsets = None if self.symmetric else zeros.t().float() - (middle if self.bits == 8 else 0)
        return _WordCodes(plain(waiting, "qweight"), scales, offsets, order, self.bits)

    def _zero_words(self, words: Tensor) -> Tensor:
        if not self.less_one:
            return words
        # In one addition a word, which undoes the writers' one subtraction with its borrows.
        ones = 0x11111111 if self.bits == 4 else 0x01010101
        return words + ones


class _WordCodes:
    """Codes in words along the inputs."""

    rounding = None

    def __init__(
        self, words: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None, bits: int
    ) -> None:
        self.column_order = order
        self._words, self._bits = words, bits
        self._scales, self._offsets = scales, offsets

    def rows(self, start: int, stop: int) -> RowCodes:
        codes = unpack_words(self._words[:, start:stop].t(), self._bits)
        if self._bits == 8:
            codes = codes.bitwise_xor_(128).view(torch.int8)  # less 128
        if self.column_order is not None:
            codes = codes.index_select(1, self.column_order)
        offsets = None if self._offsets is None else self._offsets[start:stop]
        return RowCodes(codes, self._scales[start:stop], offsets)


def columns_by_group(groups: Tensor, columns: int, group: int, name: str) -> Tensor | None:
    """Return the columns sorted by their group, [columns] int64; None where they are in order.

    `groups` [columns] is g_idx; every group must have `group` columns.
    """
    count = columns // group
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= count:
        raise CheckpointError(
            f"{name} names the groups {low} to {high} in g_idx; with {columns} inputs in groups of "
            f"{group} they must be 0 to {count - 1}"
        )
    sizes = torch.bincount(groups.long(), minlength=count)
    if not torch.all(sizes == group):
        odd = int((sizes != group).nonzero()[0])
        raise CheckpointError(
            f"{name} has {int(sizes[odd])} inputs of group {odd} in g_idx; each group must have {group}"
        )
    order = torch.argsort(groups, stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order
