"""What the engine needs of the files of a model. Formats: one file each, chosen in `__init__`.

Names are always Hugging Face's and `config` always has config.json's keys; a format that has others
(GGUF) translates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the files describe it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the format's own word: "BF16", "F32", "Q4_K", ...
    size_bytes: int  # in the file


class Checkpoint(Protocol):
    """An opened, checked, memory-mapped model."""

    path: Path
    format: str  # "safetensors" | "gguf"
    config: dict[str, Any]
    generation_config: dict[str, Any]  # {} when the model brings none

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor by its Hugging Face name, without reading data."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor once: a view of the mapped file, or a dequantized copy (float32)."""
        ...
