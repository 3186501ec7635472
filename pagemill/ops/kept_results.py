"""Memory for the logits of many rows, kept from call to call.

The C library maps a piece of that size anew every time and gives it back when it is freed. The kernel
then zeroes it page by page while it is written, which made the head a quarter slower for 64 rows of
150,000 logits. Here one piece, in large pages, waits for the next result once nobody has the last one. Results of a
dtype of their own are logits; all others are small, or as large once in a while. Called by the native products.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pagemill.device.host_memory import lazy_zeros

# glibc never keeps more than that in one piece; kept pieces are multiples of it.
LEAST_BYTES = 32 << 20


def new_result(
    rows: int, features: int, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> Tensor:
    """Return an unfilled tensor [rows, features] of `out_dtype`, from kept memory, or of `dtype`."""
    if out_dtype is None:
        return torch.empty(rows, features, dtype=dtype)
    return _RESULTS.empty(rows, features, out_dtype)


def kept_bytes(rows: int, features: int) -> int:
    """Return the memory that float32 results of so many rows and fewer leave behind."""
    size_bytes = rows * features * 4
    return _rounded(size_bytes) if size_bytes >= LEAST_BYTES else 0


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // LEAST_BYTES) * LEAST_BYTES


class KeptResults:
    """Gives out one tensor at a time from memory that stays, and fresh ones beside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = np.empty(0, np.uint8)
        self._last: StorageWeakRef | None = None  # who has the memory

    def empty(self, rows: int, features: int, dtype: torch.dtype) -> Tensor:
        """Return an unfilled tensor [rows, features] with a storage of its own."""
        size_bytes = rows * features * dtype.itemsize
        # In a mode (while a step is recorded, or traced) memory is the mode's to give.
        if size_bytes < LEAST_BYTES or _get_current_dispatch_mode() is not None:
            return torch.empty(rows, features, dtype=dtype)
        with self._lock:
            if self._last is not None and not self._last.expired():  # type: ignore[no-untyped-call]
                return torch.empty(rows, features, dtype=dtype)
            if size_bytes > len(self._memory):
                self._memory = np.empty(0, np.uint8)  # freed first: never both
                # Rounded up, which costs addresses alone: a batch that grows is not moved every step.
                self._memory = lazy_zeros((_rounded(size_bytes),), torch.uint8).numpy()
            result = torch.from_numpy(self._memory[:size_bytes]).view(dtype).view(rows, features)
            self._last = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
            return result


_RESULTS = KeptResults()
