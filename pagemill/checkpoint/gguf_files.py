"""Models as one .gguf file, under Hugging Face's names, keys and layouts.

Large matrices are handed out as rows of the file: of plain numbers, or of blocks.
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
from pagemill.checkpoint.steady_file import SteadyFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        """Yield each tensor once: matrices of blocks as BlockTensor, large plain ones as PlainRows."""
        from torch import Tensor

        file = SteadyFile(self.path, self._file.state)
        for entry in self._renamed:
            source = self._file.tensors[entry.source]
            in_blocks = source.type_name not in PLAIN_BYTES and len(source.shape) == 2
            if in_blocks and (entry.undo is None or entry.undo in MATRIX_UNDOS):
                yield entry.name, self._blocks(file, source, entry.undo)
                continue
            stored = _plain(file, source)
            if entry.undo is not None:
                tensor = stored if isinstance(stored, Tensor) else stored.whole()
                stored = entry.undo(tensor, self._heads)
            yield entry.name, stored

    def _blocks(self, file: SteadyFile, source: GGUFTensor, undo: Undo | None) -> Stored:
        """Return a matrix in its blocks; the converter's layout change becomes an order of rows."""
        from pagemill.checkpoint.gguf_blocks import BlockTensor, FileRows

        rows, columns = source.shape
        raw = FileRows(file, source.offset, rows, source.size_bytes // rows)
        transposed = undo is transpose
        order = None
        if undo is not None and not transposed:
            order = self._row_order(rows, undo)
        return BlockTensor(source.type_name, raw, columns, order, transposed)

    def _row_order(self, rows: int, undo: Undo) -> NDArray[np.int64]:
        import torch

        order: NDArray[np.int64] = undo(torch.arange(rows), self._heads).numpy()
        return order


def _plain(file: SteadyFile, source: GGUFTensor) -> Stored:
    """Return a tensor of numbers [source.shape], made from blocks where it is no matrix."""
    import numpy as np
    import torch

    from pagemill.checkpoint.plain_rows import stored_tensor

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if source.type_name in dtypes:
        return stored_tensor(file, source.offset, source.shape, dtypes[source.type_name])
    raw = np.frombuffer(file.read(source.offset, source.size_bytes), dtype=np.uint8)
    return torch.from_numpy(dequantize(raw, source.type_name, source.shape))
