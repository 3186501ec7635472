"""What the machine can do at most, measured between the engines' turns.

Figures of engines are given as shares of these. Needs the native extension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagemill import native
from pagemill.device.host_memory import lazy_zeros

_READ_BYTES = 400_000_000  # far more than any cache holds
_FLOP_ROUNDS = 1_000_000
_TRIES = 5
_BFLOAT16 = 1  # the extension's number of the dtype


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of a few tries, with all threads."""

    read_bytes_per_s: float  # streaming from memory
    bf16_flops_per_s: float  # products and sums from registers, counted apart


class LimitsMeter:
    """Measures the limits; holds the memory that is read."""

    def __init__(self, threads: int) -> None:
        native.required().set_num_threads(threads)
        # In pages as weights have them.
        self._memory = lazy_zeros((_READ_BYTES // 8,), torch.int64).fill_(1)

    def measure(self) -> Limits:
        """Return the limits at this moment; takes about a second."""
        module = native.required()
        address = self._memory.data_ptr()
        read_s = _shortest(lambda: module.read_memory(address, _READ_BYTES))
        flops = module.peak_flops(_BFLOAT16, 0) + module.peak_flops(_BFLOAT16, _FLOP_ROUNDS)
        flops_s = _shortest(lambda: module.peak_flops(_BFLOAT16, _FLOP_ROUNDS))
        return Limits(_READ_BYTES / read_s, flops / flops_s)


def _shortest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def limits_meter(threads: int) -> LimitsMeter | None:
    """Return a meter, or None without the native extension."""
    return None if native.extension() is None else LimitsMeter(threads)
