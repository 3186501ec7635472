"""A matrix of a GGUF file in its blocks: read when it is wanted, some rows at a time.

Handed out by the GGUF checkpoint in place of a copy; whoever takes it decides between values and codes.
The layout changes of converters are undone on whole rows of blocks, which they never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagemill.checkpoint.gguf_quants import Bytes, Codes, dequantize, take_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Rows of blocks in the mapped file."""

    type_name: str
    raw: Bytes  # [rows, bytes of a row], a view of the file
    columns: int
    order: NDArray[np.int64] | None  # row i of the model's matrix is row order[i] of the file
    transposed: bool  # the checkpoint's tensor is the transpose of these rows

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.raw)

    def values(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop as float32 [stop - start, columns]."""
        import torch

        taken = self._raw_rows(start, stop)
        return torch.from_numpy(dequantize(taken, self.type_name, (len(taken), self.columns)))

    def codes(self, start: int, stop: int) -> Codes:
        """Return rows start:stop taken apart."""
        return take_apart(self._raw_rows(start, stop), self.type_name)

    def dequantized(self) -> Tensor:
        """Return the checkpoint's whole tensor as float32."""
        values = self.values(0, self.rows)
        return values.t() if self.transposed else values

    def _raw_rows(self, start: int, stop: int) -> Bytes:
        return self.raw[start:stop] if self.order is None else self.raw[self.order[start:stop]]
