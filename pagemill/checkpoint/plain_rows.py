"""Tensors of plain numbers in a file: small ones read at once, large matrices when they are wanted.

A matrix that is packed or cast is needed once, some rows at a time; so it never stands in memory beside
what is made of it. Called by the readers of this room.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagemill.checkpoint.steady_file import SteadyFile

if TYPE_CHECKING:
    from torch import Tensor

    from pagemill.checkpoint.base import Stored

# Tensors of up to so many bytes are read at once.
_WHOLE_BYTES = 1 << 20
# Those from so many bytes on are read into pages of their own, which the system gets back with the tensor.
# What malloc is given back stays with the process, and is cut up by small tensors that are kept: the next
# piece of the file no longer fits, and the pieces of a whole model's add up.
_OWN_PAGES_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The rows of a matrix in a file, which has been checked to hold them."""

    file: SteadyFile
    offset: int  # bytes from the start of the file
    rows: int
    columns: int
    dtype: torch.dtype
    transposed = False

    def values(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop in the file's dtype, [stop - start, columns]."""
        at = self.offset + start * self.columns * self.dtype.itemsize
        return read_tensor(self.file, at, (stop - start, self.columns), self.dtype)

    def whole(self) -> Tensor:
        """Return the matrix."""
        return self.values(0, self.rows)


def read_tensor(
    file: SteadyFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor [shape] of the file in memory of its own."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _OWN_PAGES_BYTES:
        raw = torch.empty(size_bytes, dtype=torch.uint8)
    else:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes)
    file.read_into(offset, raw.numpy().data)
    return raw.view(dtype).view(shape)


def stored_tensor(
    file: SteadyFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Stored:
    """Return a tensor [shape] of the file, or a large matrix as rows that are read when wanted."""
    if len(shape) == 2 and math.prod(shape) * dtype.itemsize > _WHOLE_BYTES:
        return PlainRows(file, offset, *shape, dtype)
    return read_tensor(file, offset, shape, dtype)
