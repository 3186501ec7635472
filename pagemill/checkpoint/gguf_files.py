"""Models as one .gguf file, under Hugging Face's names, keys and layouts.

Owns the mapping of the file. Plain tensors are views of it, quantized matrices rows of blocks in it.
Called by `open_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill.checkpoint.base import Stored, TensorInfo
from pagemill.checkpoint.gguf_config import architecture_of, heads_of, make_configs
from pagemill.checkpoint.gguf_names import MATRIX_UNDOS, Undo, rename, transpose
from pagemill.checkpoint.gguf_quants import dequantize, require_supported
from pagemill.checkpoint.gguf_reader import PLAIN_BYTES, GGUFTensor, read_gguf
from pagemill.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class GGUFCheckpoint:
    """A checked file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        names = architecture_of(self._file).names
        self.config, self.generation_config = make_configs(self._file)
        self._heads = heads_of(self.config)
        self._renamed = rename(self._file, names, self._heads)
        for entry in self._renamed:
            source = self._file.tensors[entry.source]
            require_supported(source.type_name, f"{path}: tensor {source.name!r}")

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor by its Hugging Face name; dtypes are the types in the file."""
        return {
            entry.name: TensorInfo(entry.name, entry.shape, source.type_name, source.size_bytes)
            for entry in self._renamed
            for source in [self._file.tensors[entry.source]]
        }

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield each tensor once: F32, F16 and BF16 as views, matrices of blocks as BlockTensor."""
        import numpy as np

        if self._file.path.stat().st_size < self._file.size_bytes:
            raise CheckpointError(f"{self.path} became shorter while it was open; load it again")
        # Private pages: torch wants writable memory, and a write must never reach the file.
        mapped = np.asarray(np.memmap(self.path, dtype=np.uint8, mode="c"))
        for entry in self._renamed:
            source = self._file.tensors[entry.source]
            raw = mapped[source.offset : source.offset + source.size_bytes]
            in_blocks = source.type_name not in PLAIN_BYTES and len(source.shape) == 2
            if in_blocks and (entry.undo is None or entry.undo in MATRIX_UNDOS):
                yield entry.name, self._blocks(raw, source, entry.undo)
                continue
            tensor = _to_torch(raw, source)
            yield entry.name, tensor if entry.undo is None else entry.undo(tensor, self._heads)

    def _blocks(self, raw: NDArray[np.uint8], source: GGUFTensor, undo: Undo | None) -> Stored:
        """Return a matrix in its blocks; the converter's layout change becomes an order of rows."""
        from pagemill.checkpoint.gguf_blocks import BlockTensor

        rows, columns = source.shape
        transposed = undo is transpose
        order = None
        if undo is not None and not transposed:
            order = self._row_order(rows, undo)
        return BlockTensor(source.type_name, raw.reshape(rows, -1), columns, order, transposed)

    def _row_order(self, rows: int, undo: Undo) -> NDArray[np.int64]:
        import torch

        order: NDArray[np.int64] = undo(torch.arange(rows), self._heads).numpy()
        return order


def _to_torch(raw: NDArray[np.uint8], source: GGUFTensor) -> Tensor:
    """Return a tensor's bytes as torch's: [source.shape]."""
    import torch

    if PLAIN_BYTES.get(source.type_name) and source.offset % PLAIN_BYTES[source.type_name] == 0:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return torch.from_numpy(raw).view(dtype[source.type_name]).reshape(source.shape)
    return torch.from_numpy(dequantize(raw, source.type_name, source.shape))
