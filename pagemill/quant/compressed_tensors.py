"""compressed-tensors checkpoints: integers of 4 and 8 bits and float8, by groups of modules.

"pack-quantized" puts codes into 32-bit words along the inputs (`weight_packed`), the others keep int8
or float8 as they are (`weight`); scales (`weight_scale`) are for the tensor, each output, groups of
inputs or blocks, zero points (`weight_zero_point`) for the same. Modules are chosen by class, name or
regular expression (`targets`, `ignore`). Written by LLM Compressor, AutoRound and others; the layout is
the compressed-tensors library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagemill.checkpoint.base import Stored
from pagemill.errors import CheckpointError
from pagemill.ops.reference import Int8Rounding
from pagemill.quant.base import LayerPart, ModuleName
from pagemill.quant.fp8 import UNUSED_SCALES, FloatMatrix, read_blocks
from pagemill.quant.gptq import columns_by_group
from pagemill.quant.packed import SIGNED_TABLE, UNSIGNED_TABLE, PackedFormat
from pagemill.quant.stored import (
    FLOATS,
    ByteCodes,
    CodeSource,
    MatrixFormat,
    RoundedFormat,
    RowCodes,
    SchemeReader,
    Wanted,
    check_group,
    matches_regex,
    plain,
    unpack_words,
    whole_row,
)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class _Group:
    """How the modules of one group are quantized."""

    targets: tuple[str, ...]
    in_words: bool
    kind: str  # "int" or "float"
    bits: int
    symmetric: bool
    group: int  # -1: whole rows
    blocks: tuple[int, int] | None
    reorders: bool
    activations: RoundedFormat | None  # None: they stay as they are


class CompressedTensors:
    """Groups of modules, each with a setting of its own."""

    ignored = (
        *UNUSED_SCALES,
        r".*\.(input_zero_point|[qkv]_zero_point|output_zero_point)",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        reader = SchemeReader(config, "compressed-tensors")
        _refuse_further_steps(reader)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise reader.error("config_groups", groups, "it must map names to groups of modules")
        self._groups = [_read_group(reader, key, group) for key, group in groups.items()]
        self._left_out = reader.names("ignore")

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return the format of the first group that a module belongs to."""
        name = part.name
        if _named(name, self._left_out):
            return None
        kind = "Embedding" if part.lookup else "Linear"
        for group in self._groups:
            if kind in group.targets or _named(name, group.targets):
                return _matrix(group, part, columns)
        return None


def _refuse_further_steps(reader: SchemeReader) -> None:
    """Refuse what would need a step that is not there: sparse storage, and turned activations."""
    sparsity = reader.config.get("sparsity_config") or {}
    stored = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if stored != "dense":
        raise reader.error("sparsity_config.format", stored, "supported: 'dense'")
    if reader.config.get("transform_config"):
        raise reader.error(
            "transform_config", reader.config["transform_config"], "transforms are not supported"
        )


def _named(name: ModuleName, patterns: Iterable[str]) -> bool:
    return any(
        matches_regex(name, pattern[3:]) if pattern.startswith("re:") else pattern in name.spellings
        for pattern in patterns
    )


def _read_group(whole: SchemeReader, key: str, group: Any) -> _Group:
    where = f"compressed-tensors, config_groups.{key}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise whole.error(f"config_groups.{key}", group, "it must be an object with weights")
    reader = SchemeReader(group["weights"], f"{where}.weights")
    outer = SchemeReader(group, where)
    if group.get("output_activations") is not None:
        raise outer.error("output_activations", group["output_activations"], "supported: null")
    written = group.get("format") or whole.config.get("format")
    if written not in _FORMATS:
        raise whole.error("format", written, f"supported: {', '.join(_FORMATS)}")
    kind = reader.choice("type", ("int", "float"), "int")
    bits = reader.choice("num_bits", (4, 8) if kind == "int" else (8,), 8)
    strategy = reader.choice("strategy", _STRATEGIES, "tensor")
    if (strategy == "block") != (
        kind == "float"
        and "block_structure" in group["weights"]
        and group["weights"]["block_structure"] is not None
    ):
        raise reader.error(
            "strategy", strategy, "blocks are supported for float8, with block_structure"
        )
    size = -1
    if strategy == "group":
        size = reader.group_size(reader.config.get("group_size"))
    blocks = read_blocks(reader, "block_structure")
    if kind == "float" and strategy == "group":
        blocks, size = (1, size), -1
    reorder = reader.choice(
        "actorder", (True, False, "group", "weight", "static", "dynamic"), False
    )
    made = _Group(
        targets=tuple(outer.names("targets")),
        in_words=written == "pack-quantized",
        kind=kind,
        bits=bits,
        symmetric=reader.flag("symmetric", True),
        group=size,
        blocks=blocks,
        reorders=reorder in (True, "group", "dynamic"),
        activations=None,
    )
    return replace(made, activations=_read_activations(outer, made))


def _read_activations(reader: SchemeReader, weights: _Group) -> RoundedFormat | None:
    """Return how activations become int8, where weights have one scale an output and no zero points.

    Elsewhere they stay in the model's dtype, which is more exact than what was asked for.
    """
    given = reader.config.get("input_activations")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise reader.error("input_activations", given, "it must be an object or null")
    inner = SchemeReader(given, f"{reader.method}.input_activations")
    kind = inner.choice("type", ("int", "float"), "int")
    inner.choice("num_bits", (8,), 8)
    dynamic = inner.flag("dynamic", False)
    allowed: tuple[str, ...] = ("token",) if dynamic else ("tensor",)
    if kind == "float":
        allowed = ("token", "tensor", "group", "block")
    why = "; scales are fixed, or of one token each, never of a batch"
    inner.choice("strategy", allowed, allowed[0], why)
    symmetric = inner.flag("symmetric", True)
    by_output = weights.symmetric and weights.group == -1 and weights.blocks is None
    whole = weights.kind == "int" and weights.bits == 8 and not weights.in_words
    if kind == "float" or not whole or not by_output:
        return None
    return RoundedFormat(fixed=not dynamic, zero_points=dynamic and not symmetric)


def _matrix(group: _Group, part: LayerPart, columns: int) -> MatrixFormat:
    name, rows = part.name, part.stop - part.start
    if group.kind == "float":
        if not group.symmetric:
            raise CheckpointError(f"{name.plain} is float8 and not symmetric; it must be symmetric")
        return FloatMatrix(rows, columns, group.blocks)
    size = check_group(name, columns, group.group)
    rounded = None if part.lookup else group.activations
    return _IntMatrix(rows, columns, group, size, rounded)


@dataclass(frozen=True, slots=True)
class _IntMatrix:
    """A matrix of whole numbers, in words or as int8."""

    rows: int
    columns: int
    setting: _Group
    group: int
    rounded: RoundedFormat | None

    @property
    def reorders(self) -> bool:
        """Return whether columns may be sorted by group."""
        return self.setting.reorders

    @property
    def packed(self) -> PackedFormat | RoundedFormat:
        """Return the packed format; numbers of 4 bits that come as int8 become nibbles."""
        if self.rounded is not None:
            return self.rounded
        group = whole_row(self.columns) if self.group == self.columns else self.group
        offset = "none" if self.setting.symmetric else "zero"
        if self.setting.bits == 8:
            return PackedFormat("int8", group, offset)
        return PackedFormat(
            "int4", group, offset, SIGNED_TABLE if self.setting.symmetric else UNSIGNED_TABLE
        )

    def wanted(self) -> Mapping[str, Wanted]:
        """Return weight, scales and what the setting asks for beside them."""
        groups, per_word = self.columns // self.group, 32 // self.setting.bits
        by_row = (self.rows, groups)
        shapes: tuple[tuple[int, ...], ...] = (by_row,)
        if groups == 1:
            shapes = (by_row, (self.rows,), (1,), (), (1, 1))
        found = {"weight_scale": Wanted(shapes, FLOATS)}
        if self.setting.in_words:
            words = (self.rows, -(-self.columns // per_word))
            found["weight_packed"] = Wanted((words,), ("I32",))
            found["weight_shape"] = Wanted(((2,),), ("I64", "I32"))
        else:
            found["weight"] = Wanted(((self.rows, self.columns),), ("I8",))
        if not self.setting.symmetric:
            packed = (-(-self.rows // per_word), groups)
            found["weight_zero_point"] = Wanted((*shapes, packed), ("I8", "I32"))
        else:  # some writers give zero points to symmetric matrices too, all zero
            found["weight_zero_point"] = Wanted(shapes, ("I8",), optional=True)
        if self.setting.reorders:
            shape = (self.columns,)
            found["weight_g_idx"] = Wanted((shape,), ("I32", "I64"), optional=groups == 1)
        if self.rounded is not None and self.rounded.fixed:
            found["input_scale"] = Wanted(((), (1,), (1, 1)), FLOATS)
            found["input_zero_point"] = Wanted(((), (1,), (1, 1)), ("I8", "I32"), optional=True)
        return found

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the codes."""
        scales = self._by_row(plain(waiting, "weight_scale").float())
        zeros = self._zeros(waiting, name)
        order = None
        if "weight_g_idx" in waiting:
            groups = plain(waiting, "weight_g_idx")
            if not torch.all(groups == -1):  # what writers leave in an order that is not used
                order = columns_by_group(groups, self.columns, self.group, name)
        if self.setting.in_words:
            shape = plain(waiting, "weight_shape").tolist()
            if shape != [self.rows, self.columns]:
                raise CheckpointError(
                    f"{name}.weight_shape is {shape}, needed {[self.rows, self.columns]}; the files do "
                    "not belong to config.json"
                )
            return _WordCodes(self, plain(waiting, "weight_packed"), scales, zeros, order)
        codes = plain(waiting, "weight")
        if self.setting.bits == 4:
            if int(codes.min()) < -8 or int(codes.max()) > 7:
                raise CheckpointError(f"{name}.weight goes past -8 to 7, the numbers of 4 bits")
            codes = (codes + 8).view(torch.uint8)
        return ByteCodes(codes, scales, zeros, self._rounding(waiting, name))

    def _rounding(self, waiting: Mapping[str, Stored], name: str) -> Int8Rounding | None:
        if self.rounded is None:
            return None
        if not self.rounded.fixed:
            return Int8Rounding(row_zero_points=self.rounded.zero_points)
        zero = int(plain(waiting, "input_zero_point")) if "input_zero_point" in waiting else 0
        try:
            return Int8Rounding(float(plain(waiting, "input_scale")), zero)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}. The files are damaged") from error

    def _by_row(self, numbers: Tensor) -> Tensor:
        """Return what may be one number for all as [rows, groups]."""
        if numbers.numel() in (1, self.rows):
            return numbers.reshape(-1, 1).expand(self.rows, self.columns // self.group)
        return numbers

    def _zeros(self, waiting: Mapping[str, Stored], name: str) -> Tensor | None:
        """Return zero points as the packed format counts them, [rows, groups]."""
        if "weight_zero_point" not in waiting:
            return None
        zeros = plain(waiting, "weight_zero_point")
        middle = 1 << (self.setting.bits - 1)
        if zeros.dtype == torch.int32:
            zeros = (
                unpack_words(zeros.t(), self.setting.bits).t()[: self.rows].to(torch.int16) - middle
            )
        if self.setting.symmetric:
            if zeros.any():
                raise CheckpointError(
                    f"{name}.weight_zero_point holds numbers other than 0, but quantization_config says "
                    "symmetric; the files do not belong to config.json"
                )
            return None
        return self._by_row(zeros.float()) + (8 if self.setting.bits == 4 else 0)


class _WordCodes:
    """Codes in words along the inputs, the middle added."""

    rounding = None

    def __init__(
        self,
        matrix: _IntMatrix,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None,
    ) -> None:
        self.column_order = order
        self._words, self._scales, self._zeros, self._matrix = words, scales, zeros, matrix

    def rows(self, start: int, stop: int) -> RowCodes:
        bits = self._matrix.setting.bits
        codes = unpack_words(self._words[start:stop], bits)[:, : self._matrix.columns]
        if bits == 8:
            codes = codes.bitwise_xor(128).view(torch.int8)  # less 128
        if self.column_order is not None:
            codes = codes.index_select(1, self.column_order)
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return RowCodes(codes.contiguous(), self._scales[start:stop], zeros)
