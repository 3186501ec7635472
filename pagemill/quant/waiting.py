"""Rows of a matrix that wait as the files have them, to be packed without being written first.

Called by the formats that pack plain rows, and by the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagemill.checkpoint.base import Stored
from pagemill.quant.base import Target

# Elements that are cast at a time on their way into tiles: they stay in the caches.
_SLICE_ELEMENTS = 1 << 18
# Those that are only read: so many that waking the threads, once a piece, does not count.
_READ_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a layer's matrix from `start` on, as a file or memory has them."""

    start: int
    stored: Stored  # [rows, columns]
    columns: int
    dtype: torch.dtype  # the model's

    @property
    def stop(self) -> int:
        """Return the row after the last one."""
        stored = self.stored
        return self.start + (len(stored) if isinstance(stored, Tensor) else stored.rows)

    def slices(self, start: int, stop: int, multiple: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (row, rows from there on) of rows start:stop in the model's dtype.

        What lies in memory and needs no cast comes at once; else some rows at a time, a multiple but
        for the last.
        """
        if start >= stop:
            return
        stored, first = self.stored, self.start
        as_it_is = stored.dtype == self.dtype
        if isinstance(stored, Tensor) and as_it_is:
            yield start, stored[start - first : stop - first]
            return
        most = _READ_ELEMENTS if as_it_is else _SLICE_ELEMENTS
        step = max(1, most // self.columns // multiple) * multiple
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            if isinstance(stored, Tensor):
                values = stored[begin - first : end - first]
            else:
                values = stored.values(begin - first, end - first)
            yield begin, values.to(self.dtype)

    def copy_to(self, weight: Tensor) -> None:
        """Write the rows into the matrix."""
        Target.of(weight[self.start : self.stop]).fill(self.stored)


@dataclass(frozen=True, slots=True)
class WaitingRows(Target):
    """Rows of a matrix that need not be written: they wait as the file has them until it is packed."""

    start: int = 0
    waiting: list[StoredRows] = field(default_factory=list)

    def fill(self, stored: Stored) -> None:
        """Keep the rows, unread; write them where they come in another shape."""
        rows = StoredRows(self.start, stored, self.view.shape[1], self.view.dtype)
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
