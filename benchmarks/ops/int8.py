"""Time int8 linear layers beside bfloat16 ones, and against the machine's own limits.

    python -m benchmarks.ops.int8 [--threads 1] [--isa avx2] [--seconds 0.2] [--rows 1,4,16]

Each line is one matrix of a model: for each number of rows the weight bytes read a second as a share of
this machine's streaming bandwidth, the operations a second as a share of the peak of int8 products from
registers, and how many times as fast as `ops.cpu.linear` in bfloat16 it is. Limits are measured in the
same run; the two layers take turns, call by call, and minima are compared. Weights come from memory, not
from a cache: as many copies as fill 200 MB are used in turn. With one thread times are its CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.ops.linear import SHAPES, shortest
from pagemill import native
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as ops
from pagemill.ops import cpu_int8 as int8

_COPIES_BYTES = 200_000_000


def in_turn(
    calls: list[Callable[[int], object]], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Return the least time of each call; they take turns, and get the number of the round."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds * len(calls)
    while len(times[0]) < 4 or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call(len(taken))
            taken.append(clock() - start)
    return [min(taken[1:]) for taken in times]


def measure(
    shape: tuple[int, int], rows: list[int], limits: tuple[float, float], seconds: float,
    clock: Callable[[], float],
) -> str:  # fmt: skip
    """Return one shape's figures."""
    n, k = shape
    weight = (torch.rand(n, k) - 0.5).to(torch.bfloat16)
    wide, narrow = [], []
    for _ in range(max(1, _COPIES_BYTES // (n * k))):
        codes = torch.empty(int8.packed_shape(n, k), dtype=torch.uint8)
        scales = torch.empty(len(codes) * ops.TILE)
        int8.quantize(weight, codes, scales)
        narrow.append((codes, scales))
    for _ in range(max(1, _COPIES_BYTES // (2 * n * k))):
        packed = torch.empty(ops.packed_shape(n, k, weight.dtype), dtype=weight.dtype)
        ops.pack_linear(weight, packed)
        wide.append(packed)
    parts = []
    for m in rows:
        x = (torch.rand(m, k) - 0.5).to(torch.bfloat16)
        ours, theirs = in_turn(
            [
                lambda i: int8.linear_int8(x, *narrow[i % len(narrow)], n),  # noqa: B023
                lambda i: ops.linear(x, wide[i % len(wide)], n),  # noqa: B023
            ],
            seconds,
            clock,
        )
        bandwidth, peak = n * k / ours, 2 * m * n * k / ours
        parts.append(
            f"{m:>5}: {bandwidth / limits[0]:4.0%} {peak / limits[1]:4.0%} x{theirs / ours:4.2f}"
        )
    return f"{n:>6} x {k:<5} " + " |".join(parts)


def main() -> None:
    """Measure the limits, then every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--rows", default="1,2,4,8,16,64,512,2048")
    parser.add_argument("--models", default=",".join(SHAPES))
    arguments = parser.parse_args()
    module = native.required()
    if arguments.isa:
        native.use_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    module.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    seconds = arguments.seconds
    memory = torch.ones(400_000_000 // 8, dtype=torch.int64)
    operations = module.peak_int8_ops(200_000)
    peak = operations / shortest(lambda _: module.peak_int8_ops(200_000), seconds, clock)
    took = shortest(
        lambda _: module.read_memory(memory.data_ptr(), 400_000_000), 4 * seconds, clock
    )
    bandwidth = 400_000_000 / took
    print(
        f"int8, {module.active_isa()}, {arguments.threads} threads: streaming "
        f"{bandwidth / 1e9:.1f} GB/s, peak {peak / 1e9:.0f} GOP/s\n"
        "rows: share of the streaming bandwidth, share of the peak, times as fast as bfloat16"
    )
    for model in arguments.models.split(","):
        print(model)
        for shape in dict.fromkeys(SHAPES[model]):
            line = measure(
                shape, [int(word) for word in arguments.rows.split(",")], (bandwidth, peak),
                seconds, clock,
            )  # fmt: skip
            print("  " + line, flush=True)


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
