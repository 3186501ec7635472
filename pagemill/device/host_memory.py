"""Zeroed tensors in host memory that cost nothing until they are written.

A KV pool is gigabytes of which a short run touches little. `torch.zeros` writes all of it at start; the
kernel's own fresh pages are zero already and are backed on their first write. Called by attention
backends for pools on the CPU.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zeroed CPU tensor over fresh, page-aligned memory, freed with the tensor."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
