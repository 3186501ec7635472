"""Models as one .gguf file, under Hugging Face's names, keys and layouts.

Owns the mapping of the file. Plain tensors are views of it; quantized ones become float32 copies, one at
a time. Called by `open_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill.checkpoint.base import TensorInfo
from pagemill.checkpoint.gguf_config import architecture_of, heads_of, make_configs
from pagemill.checkpoint.gguf_names import rename
from pagemill.checkpoint.gguf_quants import dequantize, require_supported
from pagemill.checkpoint.gguf_reader import GGUFTensor, read_gguf
from pagemill.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

# Types that are handed out as views, with the bytes of an element.
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2}


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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor once: F32, F16 and BF16 in their dtypes, quantized ones as float32."""
        import numpy as np

        if self._file.path.stat().st_size < self._file.size_bytes:
            raise CheckpointError(f"{self.path} became shorter while it was open; load it again")
        # Private pages: torch wants writable memory, and a write must never reach the file.
        mapped = np.asarray(np.memmap(self.path, dtype=np.uint8, mode="c"))
        for entry in self._renamed:
            source = self._file.tensors[entry.source]
            raw = mapped[source.offset : source.offset + source.size_bytes]
            tensor = _to_torch(raw, source)
            yield entry.name, tensor if entry.undo is None else entry.undo(tensor, self._heads)


def _to_torch(raw: NDArray[np.uint8], source: GGUFTensor) -> Tensor:
    """Return a tensor's bytes as torch's: [source.shape]."""
    import torch

    if _PLAIN.get(source.type_name) and source.offset % _PLAIN[source.type_name] == 0:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return torch.from_numpy(raw).view(dtype[source.type_name]).reshape(source.shape)
    return torch.from_numpy(dequantize(raw, source.type_name, source.shape))
