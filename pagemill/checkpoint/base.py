"""What the engine needs of the files of a model. Formats: one file each, chosen in `__init__`.

Names are always Hugging Face's and `config` always has config.json's keys; a format that has others
(GGUF) translates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RowSource(Protocol):
    """A matrix whose numbers are read from the file when they are wanted."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return what `values` gives: the file's dtype for plain numbers, else float32."""
        ...

    @property
    def transposed(self) -> bool:
        """Return whether the tensor that the names promise is the transpose of these rows."""
        ...

    def values(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop [stop - start, columns] in new memory."""
        ...

    def whole(self) -> Tensor:
        """Return the tensor that the names promise, all of it."""
        ...


Stored: TypeAlias = "Tensor | RowSource"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the files describe it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the format's own word: "BF16", "F32", "Q4_K", ...
    size_bytes: int  # in the file


class Checkpoint(Protocol):
    """An opened, checked model. A file that changes until its last tensor is read is a CheckpointError."""

    path: Path
    format: str  # "safetensors" | "gguf"
    config: dict[str, Any]
    generation_config: dict[str, Any]  # {} when the model brings none

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor by its Hugging Face name, without reading data."""
        ...

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield each tensor once: in memory, or a matrix as rows that are read on demand."""
        ...
