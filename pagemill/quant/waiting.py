"""Rows of a matrix that wait as the files have them, to be packed without being written first.

A layer's rows wait in the file until the layer is complete, and are packed, or rounded into codes, slice
by slice from there: plain rows never stand in memory beside what is made of them. What comes in another
shape (transposed, head by head) or made up is written to the layer's matrix first, which is dropped when
it is packed. `WaitingMatrix` is what such formats begin with; called by `quant.native`,
`quant.while_loading` and the methods made of it, and the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from pagemill.checkpoint.base import Stored
from pagemill.device.host_memory import lazy_zeros
from pagemill.ops.packed import TILE
from pagemill.quant.base import LinearShape, Target
from pagemill.quant.none import Unquantized

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


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Some rows of one part of a layer, which begin where a tile does."""

    part: int
    start: int  # in the part
    values: Tensor  # [rows, in] in the model's dtype

    def first_tile(self, parts: int) -> int:
        """Return the tile of the first row where the tiles of `parts` parts take turns."""
        return self.part + self.start // TILE * parts


class WaitingMatrix(Unquantized):
    """Filled like the plain format, but for rows that wait; a subclass says in `finish` what is made of them.

    There it takes `slices` of a layer that is not on the meta device, then calls `drop_rows`.
    """

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register unfilled rows, which take no memory until they are written."""
        super().create_weights(layer, shape, dtype, device)
        layer.waiting = []  # type: ignore[assignment]

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the unfilled matrix in pages of its own, which the system gets back when it is packed.

        What malloc is given back it may keep: here that would be a second copy of the weights.
        """
        if device.type == "meta":
            return super().allocate(shape, dtype, device)
        return lazy_zeros(shape, dtype)

    def targets(self, layer: nn.Module, start: int, stop: int) -> dict[str, Target]:
        """Return the rows of the matrix, which wait for `finish`, and those of the bias."""
        found = super().targets(layer, start, stop)
        rows = found["weight"]
        found["weight"] = WaitingRows(rows.view, rows.shape, start=start, waiting=_waiting(layer))
        return found

    def finish_lookup(self, layer: nn.Module) -> None:
        """Fill the matrix with the rows that wait."""
        weight, waiting = cast(Tensor, layer.weight), _waiting(layer)
        for rows in waiting:
            rows.copy_to(weight)
        waiting.clear()


def slices(layer: nn.Module, parts: int) -> Iterator[RowSlice]:
    """Yield all rows of a layer of equal parts, those that wait straight from the file.

    A slice has rows of one part, a multiple of a tile's but for the last of the part's.
    """
    part_rows = cast(LinearShape, layer.shape).out_features // parts
    for rows in _sources(layer, part_rows):
        for part in range(parts):
            low = part * part_rows
            first, stop = max(rows.start, low), min(rows.stop, low + part_rows)
            for start, values in rows.slices(first, stop, TILE):
                yield RowSlice(part, start - low, values)


def drop_rows(layer: nn.Module) -> None:
    """Let go of the rows of a layer, those that wait and those that were written."""
    _waiting(layer).clear()
    layer.register_parameter("weight", None)


def _sources(layer: nn.Module, part_rows: int) -> list[StoredRows]:
    """Return all rows of a layer, cut where tiles begin.

    Waiting rows that begin or end inside a tile are copied to the matrix, to be packed with their
    neighbours.
    """
    weight = cast(Tensor, layer.weight)
    columns = weight.shape[1]
    sources: list[StoredRows] = []
    end = 0
    for rows in sorted(_waiting(layer), key=lambda rows: rows.start):
        if not (_begins_tile(rows.start, part_rows) and _begins_tile(rows.stop, part_rows)):
            rows.copy_to(weight)
            continue
        if rows.start > end:
            sources.append(StoredRows(end, weight[end : rows.start], columns, weight.dtype))
        sources.append(rows)
        end = rows.stop
    if end < len(weight):
        sources.append(StoredRows(end, weight[end:], columns, weight.dtype))
    return sources


def _begins_tile(row: int, part_rows: int) -> bool:
    return row % part_rows % TILE == 0


def _waiting(layer: nn.Module) -> list[StoredRows]:
    return cast("list[StoredRows]", layer.waiting)
