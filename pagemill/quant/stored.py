"""Matrices that a checkpoint holds quantized: what its formats share.

A checkpoint's format is a `Scheme`: it says of each module whether and how its matrix is quantized, by
the configuration alone, so that a memory plan needs no file. How such matrices are packed and used is
`quant.repacked`'s. Here too: unpacking of the integers that several formats put into words. Called by
the loader (`StoredWeights`) and the schemes of this room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pagemill.checkpoint.base import Stored
from pagemill.errors import CheckpointError
from pagemill.ops.reference import Int8Rounding
from pagemill.quant.base import (
    LayerPart,
    LinearShape,
    ModuleName,
    QuantMethod,
)
from pagemill.quant.none import Unquantized
from pagemill.quant.packed import PackedFormat

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a quantized matrix has in the files."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # as the files call them
    optional: bool = False


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Some rows of a matrix; see `ops.packed` for the meaning."""

    codes: Tensor  # [rows, in] uint8, int8 or float8_e4m3fn
    scales: Tensor  # [rows, groups] float
    offsets: Tensor | None = None  # [rows, groups] float: minima or zeros, as the format says

    def checked(self, name: str, start: int) -> RowCodes:
        """Return itself; CheckpointError, naming the matrix and its rows, where it holds NaN or infinity.

        `start` is the number of the first row in the matrix `name`.
        """
        broken = self._not_finite()
        if broken is None:
            return self
        raise CheckpointError(
            f"{name}: the {broken} of rows {start} to {start + len(self.codes) - 1} hold NaN or infinity; "
            "the checkpoint is damaged: fetch or make it again"
        )

    def _not_finite(self) -> str | None:
        if not bool(self.scales.isfinite().all()):
            return "scales"
        if self.offsets is not None and not bool(self.offsets.isfinite().all()):
            return "minima or zero points"
        if self.codes.dtype == torch.float8_e4m3fn and _holds_nan(self.codes):
            return "float8 weights"
        return None


def _holds_nan(numbers: Tensor) -> bool:
    """Return whether some float8 e4m3 number is NaN: all of its bits but the sign are set."""
    magnitudes = numbers.view(torch.uint8) & 0x7F
    return bool((magnitudes == 0x7F).any())


@dataclass(frozen=True, slots=True)
class RoundedFormat:
    """int8 weights with one scale an output, times activations that become int8 as well."""

    fixed: bool  # whether the files have the scale of activations; else each row has its own
    zero_points: bool  # whether rows' own scales have zero points


class CodeSource(Protocol):
    """The codes of one matrix, made when they are wanted."""

    @property
    def column_order(self) -> Tensor | None:
        """Return [in] int64: column j of the codes multiplies input column_order[j]. None: input j."""
        ...

    @property
    def rounding(self) -> Int8Rounding | None:
        """Return how activations become int8, for a `RoundedFormat`; else None."""
        ...

    def rows(self, start: int, stop: int) -> RowCodes:
        """Return rows start:stop."""
        ...


class MatrixFormat(Protocol):
    """How one matrix [rows, columns] of a checkpoint is written."""

    @property
    def packed(self) -> PackedFormat | RoundedFormat:
        """Return the format it is packed in; those of equal formats may be packed together."""
        ...

    @property
    def reorders(self) -> bool:
        """Return whether its columns may come in another order than the inputs."""
        ...

    def wanted(self) -> Mapping[str, Wanted]:
        """Return the tensors it has in the files, by the last word of their names."""
        ...

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the codes of the tensors, which fit `wanted`; CheckpointError for what is wrong."""
        ...


class Scheme(Protocol):
    """One format of checkpoints; made from the quantization part of config.json, which it checks."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return patterns of tensor names that carry nothing this engine uses."""
        ...

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return how the matrix of a layer's part is written; None: it is not quantized."""
        ...


class StoredWeights(Unquantized):
    """The weight format of a model whose checkpoint is quantized: each layer gets its own by name."""

    def __init__(self, scheme: Scheme, dense: QuantMethod) -> None:
        """`dense` keeps what is not quantized."""
        self.scheme = scheme
        self._dense = dense

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make nothing: the layer's own format does, once its name is known."""
        layer.register_parameter("weight", None)
        layer.register_parameter("bias", None)

    def for_layer(self, shape: LinearShape, parts: Sequence[LayerPart]) -> QuantMethod:
        """Return the dense format, or one for the layer's quantized matrices."""
        from pagemill.quant.repacked import Matrix, Repacked

        found = [Matrix(part, self.scheme.matrix(part, shape.in_features)) for part in parts]
        if all(matrix.form is None for matrix in found):
            return self._dense
        return Repacked(found, self._dense)


# ---------------------------------------------------------------- what schemes share


def matches(name: ModuleName, patterns: Iterable[str]) -> bool:
    """Return whether a list of modules in config.json names this one.

    As the writers of such lists mean them: a whole name, its last words, a module that holds it, or
    "re:" and a regular expression for the beginning of the name.
    """
    for pattern in patterns:
        for spelling in name.spellings:
            if f".{pattern}." in f".{spelling}.":
                return True
        if pattern.startswith("re:") and matches_regex(name, pattern[3:]):
            return True
    return False


def matches_regex(name: ModuleName, pattern: str) -> bool:
    """Return whether the beginning of a module's name, in any spelling, matches."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"quantization_config names modules by {pattern!r}, which is no regular expression: {error}"
        ) from error
    return any(compiled.match(spelling) for spelling in name.spellings)


class SchemeReader:
    """Typed reads of the quantization part of config.json; errors name key, value and what is legal."""

    def __init__(self, config: Mapping[str, Any], method: str) -> None:
        self.config = config
        self.method = method

    def error(self, key: str, value: object, reason: str) -> CheckpointError:
        """Return the error for a key whose value will not do."""
        return CheckpointError(
            f"quantization_config of config.json ({self.method}): {key} is {value!r}; {reason}"
        )

    def choice(self, key: str, choices: Sequence[Any], default: Any, reason: str = "") -> Any:
        """Return a value that is one of `choices`; a key that is absent or null has the default."""
        value = self.config.get(key)
        if value is None:
            value = default
        if not any(type(value) is type(one) and value == one for one in choices):
            known = ", ".join(repr(one) for one in choices)
            raise self.error(key, value, f"supported: {known}{reason}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return bool(self.choice(key, (True, False), default))

    def names(self, *keys: str) -> list[str]:
        """Return the list of names under the first key present; [] without one."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(
                isinstance(one, str) and one for one in value
            ):
                raise self.error(key, value, "it must be a list of module names")
            return list(value)
        return []

    def group_size(self, value: object, key: str = "group_size") -> int:
        """Return a group size that the packed formats have; -1 stands for whole rows."""
        if type(value) is not int or (value != -1 and value != 16 and (value < 32 or value % 32)):
            raise self.error(
                key, value, "it must be 16, a multiple of 32, or -1 for one group a row"
            )
        return value


def check_group(name: ModuleName, columns: int, group: int, key: str = "group_size") -> int:
    """Return the inputs of a group, those of a whole row for -1; CheckpointError if they don't divide."""
    if group == -1:
        return columns
    if columns % group:
        raise CheckpointError(
            f"{name.plain} has {columns} inputs, which {key} {group} of quantization_config does not "
            f"divide. Quantize the model with a group size that divides {columns}, or leave the module "
            "out"
        )
    return group


def whole_row(columns: int) -> int:
    """Return the group of a packed format that has one scale a row."""
    return -(-columns // 32) * 32


def nibbles(words: Tensor) -> Tensor:
    """Return the 4-bit numbers of words [rows, n] int32, lowest first: [rows, 8 n] uint8."""
    packed = words.contiguous().view(torch.uint8)
    codes = torch.empty(packed.shape[0], packed.shape[1], 2, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=codes[:, :, 1])
    return codes.flatten(1)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the 4- or 8-bit numbers of words [rows, n] int32, lowest first, as uint8."""
    return nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)


def plain(waiting: Mapping[str, Stored], word: str) -> Tensor:
    """Return a tensor of a safetensors file, read now if it waits there."""
    found = waiting[word]
    return found if isinstance(found, Tensor) else found.whole()


class ByteCodes:
    """Bytes of a matrix whose columns are in order."""

    column_order: Tensor | None = None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None = None,
        rounding: Int8Rounding | None = None,
    ) -> None:
        self.rounding = rounding
        self._codes, self._scales, self._offsets = codes, scales, offsets

    def rows(self, start: int, stop: int) -> RowCodes:
        """Return rows start:stop."""
        offsets = None if self._offsets is None else self._offsets[start:stop]
        return RowCodes(self._codes[start:stop], self._scales[start:stop], offsets)
