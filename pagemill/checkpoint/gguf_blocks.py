"""A matrix of a GGUF file in its blocks: read when it is wanted, some rows at a time.

Handed out by the GGUF checkpoint in place of a copy; whoever takes it decides between values and codes.
The layout changes of converters are undone on whole rows of blocks, which they never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagemill.checkpoint.gguf_quants import Bytes, Codes, dequantize, take_apart
from pagemill.checkpoint.steady_file import SteadyFile

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class BlockRows(Protocol):
    """The bytes of a matrix's rows; an array [rows, bytes of a row] is such."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Bytes:
        """Return some rows by their numbers."""
        ...


@dataclass(frozen=True, slots=True)
class FileRows:
    """The bytes of rows in a file, which has been checked to hold them."""

    file: SteadyFile
    offset: int  # bytes from the start of the file
    rows: int
    row_bytes: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Bytes:
        """Read some rows; those that are neighbours in the file come in one piece."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)
            assert step == 1, "rows are read as they lie"
            found = np.empty((max(0, stop - start), self.row_bytes), dtype=np.uint8)
            self._read(start, found)
            return found
        wanted, places = np.unique(rows, return_inverse=True)
        found = np.empty((len(wanted), self.row_bytes), dtype=np.uint8)
        starts = np.flatnonzero(np.diff(wanted, prepend=-2) > 1)
        for start, stop in pairwise([*starts, len(wanted)]):
            self._read(int(wanted[start]), found[start:stop])
        return found[places]

    def _read(self, first: int, into: Bytes) -> None:
        self.file.read_into(self.offset + first * self.row_bytes, into.reshape(-1).data)


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Rows of blocks in a file."""

    type_name: str
    raw: BlockRows
    columns: int
    order: NDArray[np.int64] | None  # row i of the model's matrix is row order[i] of the file
    transposed: bool  # the checkpoint's tensor is the transpose of these rows

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.raw)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of `values`."""
        import torch

        return torch.float32

    def values(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop as float32 [stop - start, columns]."""
        import torch

        taken = self._raw_rows(start, stop)
        return torch.from_numpy(dequantize(taken, self.type_name, (len(taken), self.columns)))

    def codes(self, start: int, stop: int) -> Codes:
        """Return rows start:stop taken apart."""
        return take_apart(self._raw_rows(start, stop), self.type_name)

    def whole(self) -> Tensor:
        """Return the checkpoint's whole tensor as float32."""
        values = self.values(0, self.rows)
        return values.t() if self.transposed else values

    def _raw_rows(self, start: int, stop: int) -> Bytes:
        return self.raw[start:stop] if self.order is None else self.raw[self.order[start:stop]]
