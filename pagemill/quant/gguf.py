"""GGUF's block formats, kept as codes: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K.

Codes are taken over as they are, without a detour through floating-point weights; what a group is
scaled by is the product of the format's own factors. Scales that are float16 in the file stay exact;
the products of the K formats are rounded to float16 relative to their row's largest. Types of five and
six bits become signed bytes. Matrices of plain numbers (F32, F16, BF16) stay dense. Chosen by
`quantization_config`, which the GGUF reader makes from the types in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.checkpoint.base import Stored
from pagemill.checkpoint.gguf_blocks import BlockTensor
from pagemill.checkpoint.gguf_quants import BLOCK_FORMATS, BlockFormat
from pagemill.quant.base import LayerPart
from pagemill.quant.packed import SIGNED_TABLE, UNSIGNED_TABLE, PackedFormat
from pagemill.quant.stored import CodeSource, MatrixFormat, RowCodes, SchemeReader, Wanted


class GGUF:
    """Each module has the type that its tensor has in the file."""

    ignored = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        reader = SchemeReader(config, "gguf")
        types = config.get("types")
        if not isinstance(types, Mapping):
            raise reader.error("types", types, "it is made from a .gguf file, and is read with one")
        for module, kind in types.items():
            if not isinstance(kind, str) or kind not in BLOCK_FORMATS:
                known = ", ".join(BLOCK_FORMATS)
                raise reader.error(f"types[{module!r}]", kind, f"types in blocks are {known}")
        self._types: Mapping[str, str] = types

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return the format of a module that the file holds in blocks."""
        for spelling in part.name.spellings:
            kind = self._types.get(spelling)
            if kind is not None:
                shape = (part.stop - part.start, columns)
                return _Blocks(kind, shape[::-1] if part.transposed else shape)
        return None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A matrix in one block format."""

    type_name: str
    shape: tuple[int, int]  # as the checkpoint promises it
    reorders = False

    @property
    def packed(self) -> PackedFormat:
        """Return the packed format with the same codes and groups."""
        return packed_format(BLOCK_FORMATS[self.type_name])

    def wanted(self) -> Mapping[str, Wanted]:
        """Return the one tensor."""
        return {"weight": Wanted((self.shape,), (self.type_name,))}

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the codes of the blocks."""
        blocks = waiting["weight"]
        assert isinstance(blocks, BlockTensor)
        return _BlockCodes(blocks)


class _BlockCodes:
    column_order: Tensor | None = None
    rounding = None

    def __init__(self, blocks: BlockTensor) -> None:
        self._blocks = blocks

    def rows(self, start: int, stop: int) -> RowCodes:
        codes, scales, minima = self._blocks.codes(start, stop)
        offsets = None if minima is None else torch.from_numpy(minima)
        return RowCodes(torch.from_numpy(codes), torch.from_numpy(scales), offsets)


def packed_format(kind: BlockFormat) -> PackedFormat:
    """Return the packed format that holds the codes of a block format."""
    offset = "min" if kind.has_minima else "none"
    if kind.bits == 8:
        return PackedFormat("int8", kind.group, offset)
    return PackedFormat("int4", kind.group, offset, SIGNED_TABLE if kind.zero else UNSIGNED_TABLE)
