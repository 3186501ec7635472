"""Rows of a matrix that wait as the files have them, to be packed without being written first.

Called by the formats that pack plain rows, and by the loader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagemill.checkpoint.base import Stored
from pagemill.quant.base import Target

# Elements that are cast at a time on their way into tiles.
_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a layer's matrix from `start` on, as a file or memory has them."""

    start: int
    stored: Stored  # [rows, in_features]
    dtype: torch.dtype  # the model's

    @property
    def stop(self) -> int:
        """Return the row after the last one."""
        stored = self.stored
        return self.start + (len(stored) if isinstance(stored, Tensor) else stored.rows)

    def step(self, multiple: int) -> int:
        """Return how many rows to take at a time, a multiple: all of those that need no cast."""
        if isinstance(self.stored, Tensor) and self.stored.dtype == self.dtype:
            return max(1, self.stop - self.start)
        columns = self.values(self.start, self.start + 1).shape[1]
        return max(1, _SLICE_ELEMENTS // columns // multiple) * multiple

    def values(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop of the matrix in the model's dtype."""
        first, last = start - self.start, stop - self.start
        if isinstance(self.stored, Tensor):
            return self.stored[first:last].to(self.dtype)
        return self.stored.values(first, last).to(self.dtype)

    def copy_to(self, weight: Tensor) -> None:
        """Write the rows into the matrix."""
        Target.of(weight[self.start : self.stop]).fill(self.stored)


@dataclass(frozen=True, slots=True)
class WaitingRows(Target):
    """Rows of a matrix that need not be written: they wait as the file has them until it is packed."""

    start: int = 0
    waiting: list[StoredRows] = field(default_factory=list)

    def fill(self, stored: Stored) -> None:
        """Keep the rows, views of the mapped file; write them where they come in another shape."""
        rows = StoredRows(self.start, stored, self.view.dtype)
        if isinstance(stored, Tensor):
            as_is = stored.shape == self.view.shape and stored.stride(1) == 1
        else:
            as_is = not stored.transposed and stored.rows == len(self.view)
        if as_is:
            self.waiting.append(rows)
        else:
            Target.fill(self, stored)

    def written(self) -> Target:
        """Return the target that writes the rows at once."""
        return Target(self.view, self.shape, self.owner)
