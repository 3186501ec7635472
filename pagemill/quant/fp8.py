"""FP8 checkpoints: float8 e4m3 weights with scales for the tensor, each output, or blocks.

`quant_method` "fp8" writes one scale (`weight_scale`, or `weight_scale_inv`) or one for each block of
`weight_block_size` (`weight_scale_inv`), "fbgemm_fp8" one an output. A scale multiplies, whatever its
name says. Activations stay in the model's dtype, which is more exact than the float8 these files were
made for, so scales of activations are not used. `FloatMatrix` also serves compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.checkpoint.base import Stored
from pagemill.errors import CheckpointError
from pagemill.quant.base import LayerPart
from pagemill.quant.packed import PackedFormat
from pagemill.quant.stored import (
    FLOATS,
    ByteCodes,
    CodeSource,
    MatrixFormat,
    SchemeReader,
    Wanted,
    matches,
    plain,
    whole_row,
)

# Scales of what is not quantized here: activations, and keys and values.
UNUSED_SCALES = (r".*\.(input_scale|input_scale_ub|[qkv]_scale|output_scale)",)


class FP8:
    """One setting for all matrices of the decoder's layers, less those that are named."""

    ignored = UNUSED_SCALES

    def __init__(self, config: Mapping[str, Any]) -> None:
        method = str(config.get("quant_method", "fp8"))
        reader = SchemeReader(config, method)
        reader.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        reader.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._blocks = read_blocks(reader, "weight_block_size")
        self._left_out = reader.names("modules_to_not_convert", "ignored_layers")

    def matrix(self, part: LayerPart, columns: int) -> MatrixFormat | None:
        """Return the format of a matrix in a decoder layer."""
        name = part.name
        if re.search(r"\.\d+\.", name.plain) is None or matches(name, self._left_out):
            return None
        return FloatMatrix(part.stop - part.start, columns, self._blocks)


def read_blocks(reader: SchemeReader, key: str) -> tuple[int, int] | None:
    """Return the sizes [outputs, inputs] of blocks that share a scale; None where there are none."""
    sizes = reader.config.get(key)
    if sizes is None:
        return None
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != 2
        or not all(type(size) is int and size >= 1 for size in sizes)
    ):
        raise reader.error(key, sizes, "it must be two sizes, of outputs and of inputs")
    reader.group_size(sizes[1], f"{key}[1]")
    return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """A matrix of float8 e4m3 numbers."""

    rows: int
    columns: int
    blocks: tuple[int, int] | None  # that share a scale; None: one scale a row, or one in all
    reorders = False

    @property
    def packed(self) -> PackedFormat:
        """Return the packed format: one scale a row is kept in float32."""
        return PackedFormat(
            "fp8", whole_row(self.columns) if self.blocks is None else self.blocks[1]
        )

    def wanted(self) -> Mapping[str, Wanted]:
        """Return the weight, and its scales under either name."""
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (self.rows,), (self.rows, 1))
        if self.blocks is not None:
            shapes = ((-(-self.rows // self.blocks[0]), -(-self.columns // self.blocks[1])),)
        scale = Wanted(shapes, (*FLOATS, "F8_E8M0"), optional=True)
        return {
            "weight": Wanted(((self.rows, self.columns),), ("F8_E4M3",)),
            "weight_scale": scale,
            "weight_scale_inv": scale,
        }

    def open(self, waiting: Mapping[str, Stored], name: str) -> CodeSource:
        """Return the numbers as codes."""
        found = [word for word in ("weight_scale", "weight_scale_inv") if word in waiting]
        if len(found) != 1:
            raise CheckpointError(
                f"{name} has {' and '.join(found) or 'neither weight_scale nor weight_scale_inv'}; a "
                "float8 matrix needs exactly one of weight_scale and weight_scale_inv. The files may be "
                "incomplete; download them again"
            )
        scales = plain(waiting, found[0]).float()
        if self.blocks is None:
            scales = scales.reshape(-1, 1).expand(self.rows, 1)
        else:
            scales = scales.repeat_interleave(self.blocks[0], 0)[: self.rows]
        return ByteCodes(plain(waiting, "weight"), scales)
