"""Time the native linear layer against the machine's own limits and against torch.

    python -m benchmarks.ops.linear [--threads 1] [--isa avx2] [--seconds 0.3] [--rows 1,4,16] [--dtypes bfloat16]

Each line is one matrix of a model: for each number of rows the weight bytes read a second as a share of
this machine's streaming bandwidth, the operations a second as a share of its register-only peak, and the
ratio to torch's `F.linear` (above 1: faster). Limits are measured in the same run; weights lie where an
engine puts them and come from memory, not from a cache: as many copies as fill 200 MB are used in turn. Times are the minimum of a
short run, with one thread of its CPU time: what other processes take does not count, what they do to the
caches and to memory does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagemill import native
from pagemill.device.host_memory import lazy_zeros
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as ops

# out, in of: qkv, out, gate and up, down, head (cut to 16384 rows, which is as good as all)
SHAPES = {
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (16384, 576)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (16384, 1024)],
    "Llama-3.2-1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (16384, 2048)],
}
_COPIES_BYTES = 200_000_000


def shortest(call: Callable[[int], object], seconds: float, clock: Callable[[], float]) -> float:
    """Return the least time of a call; it gets the number of the call."""
    call(0)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = clock()
        call(len(times))
        times.append(clock() - start)
    return min(times)


def measure(
    shape: tuple[int, int], dtype: torch.dtype, rows: list[int], limits: tuple[float, float],
    seconds: float, clock: Callable[[], float],
) -> str:  # fmt: skip
    """Return one shape's figures."""
    n, k = shape
    weight = (torch.rand(n, k) - 0.5).to(dtype)
    size = n * k * dtype.itemsize
    copies = []
    for _ in range(max(1, _COPIES_BYTES // size)):
        packed = lazy_zeros(ops.packed_shape(n, k, dtype), dtype)
        ops.pack_linear(weight, packed)
        copies.append(packed)
    plain = [weight.clone() for _ in copies]
    parts = []
    for m in rows:
        x = (torch.rand(m, k) - 0.5).to(dtype)
        ours = shortest(lambda i: ops.linear(x, copies[i % len(copies)], n), seconds, clock)  # noqa: B023
        theirs = shortest(lambda i: F.linear(x, plain[i % len(plain)]), seconds, clock)  # noqa: B023
        bandwidth, peak = size / ours, 2 * m * n * k / ours
        parts.append(
            f"{m:>5}: {bandwidth / limits[0]:4.0%} {peak / limits[1]:4.0%} x{theirs / ours:4.2f}"
        )
    return f"{n:>6} x {k:<5} " + " |".join(parts)


def main() -> None:
    """Measure the limits, then every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,512,1024,2048")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--models", default=",".join(SHAPES))
    arguments = parser.parse_args()
    module = native.required()
    if arguments.isa:
        native.use_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    module.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    seconds = arguments.seconds
    rows = [int(word) for word in arguments.rows.split(",")]
    memory = lazy_zeros((400_000_000 // 8,), torch.int64).fill_(1)
    for name in arguments.dtypes.split(","):
        dtype = getattr(torch, name)
        code = 0 if dtype == torch.float32 else 1
        operations = module.peak_flops(code, 0) + module.peak_flops(code, 200_000)
        peak = operations / shortest(lambda _: module.peak_flops(code, 200_000), seconds, clock)  # noqa: B023
        took = shortest(
            lambda _: module.read_memory(memory.data_ptr(), 400_000_000), 4 * seconds, clock
        )
        bandwidth = 400_000_000 / took
        print(
            f"\n{name}, {module.active_isa()}, {arguments.threads} threads: streaming "
            f"{bandwidth / 1e9:.1f} GB/s, peak {peak / 1e9:.0f} GFLOP/s\n"
            "rows: share of the streaming bandwidth, share of the peak, times as fast as torch"
        )
        for model in arguments.models.split(","):
            print(model)
            for shape in dict.fromkeys(SHAPES[model]):
                limits = (bandwidth, peak)
                print("  " + measure(shape, dtype, rows, limits, seconds, clock), flush=True)


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
