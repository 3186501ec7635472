"""Zeroed tensors in host memory that cost nothing until they are written.

A KV pool is gigabytes of which a short run touches little. `torch.zeros` writes all of it at start; the
kernel's own fresh pages are zero already and are backed on their first write. Called by attention
backends for pools on the CPU, and by weight formats.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from pagemill.errors import OutOfMemoryError


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zeroed CPU tensor over fresh, page-aligned memory, freed with the tensor."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@contextlib.contextmanager
def refused_memory(what: str) -> Iterator[None]:
    """Raise OutOfMemoryError, naming `what` was done, where the system refuses memory inside.

    Mapped pages, torch and the native kernels each say it in an error of their own.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        refused = (
            isinstance(error, MemoryError)
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or "can't allocate memory" in str(error)
        )
        if not refused:
            raise
        raise OutOfMemoryError(
            f"the system refused memory while {what}: {error}. Raise the process's limit (ulimit -v, "
            "or the container's), free memory, or choose a smaller model, dtype or "
            "kv_cache_memory_bytes"
        ) from error
