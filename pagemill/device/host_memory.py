"""Zeroed tensors in host memory that cost nothing until they are written.

A KV pool is gigabytes of which a short run touches little. `torch.zeros` writes all of it at start; the
kernel's own fresh pages are zero already and are backed on their first write. Called by attention
backends for pools on the CPU, and by weight formats.

Linux is asked for pages of 2 MiB, as many as the tensor fills: weights and pools are read as streams, and
with pages of 4 KiB the processor stops at each to look it up. What is left over at the end is in small
pages, so no memory is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zeroed CPU tensor over fresh, page-aligned memory, freed with the tensor."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.zeros(shape, dtype=dtype)
    huge = sys.platform == "linux" and size_bytes >= _HUGE_PAGE
    # Addresses to begin at a large page; they cost nothing.
    room = _HUGE_PAGE if huge else 0
    pages = mmap.mmap(-1, size_bytes + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if huge:
        start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % _HUGE_PAGE
        _ask_for_huge_pages(pages, start, size_bytes)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


def _ask_for_huge_pages(pages: mmap.mmap, start: int, size_bytes: int) -> None:
    """Let whole large pages of the range be backed by such; a kernel without them refuses, harmlessly."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE, start, size_bytes // _HUGE_PAGE * _HUGE_PAGE)


def give_back_freed() -> None:
    """Return memory that was freed to the system, where the C library can be asked (glibc's malloc_trim).

    What loading a model needs for moments is small pieces between those that stay; the library
    would keep them for later.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
