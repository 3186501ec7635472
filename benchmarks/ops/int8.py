"""Time int8 linear layers beside bfloat16 ones, and against the machine's own limits.

    python -m benchmarks.ops.int8 [--threads 1] [--isa avx2] [--seconds 0.2] [--rows 1,4,16]

Each line is one matrix of a model: for each number of rows the weight bytes read a second as a share of
this machine's streaming bandwidth, the operations a second as a share of the peak of int8 products from
registers, and how many times as fast as `ops.cpu.linear` in bfloat16 it is. Limits are measured in the
same run; the two layers take turns, call by call, and minima are compared. Weights come from memory, not
from a cache: as many copies as fill 200 MB are used in turn. With one thread times are its CPU time.
"""

from __future__ import annotations

import torch

from benchmarks.ops.setting import (
    COPIES_BYTES,
    Setting,
    heading,
    in_turn,
    make_parser,
    settle,
    shortest,
    streaming_bandwidth,
)
from pagemill import native
from pagemill.device.host_memory import lazy_zeros
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as ops
from pagemill.ops import cpu_int8 as int8


def measure(shape: tuple[int, int], limits: tuple[float, float], setting: Setting) -> str:
    """Return one shape's figures."""
    n, k = shape
    weight = (torch.rand(n, k) - 0.5).to(torch.bfloat16)
    wide, narrow = [], []
    for _ in range(max(1, COPIES_BYTES // (n * k))):
        codes = lazy_zeros(int8.packed_shape(n, k), torch.uint8)
        scales = torch.empty(len(codes) * ops.TILE)
        int8.quantize(weight, codes, scales)
        narrow.append((codes, scales))
    for _ in range(max(1, COPIES_BYTES // (2 * n * k))):
        packed = lazy_zeros(ops.packed_shape(n, k, weight.dtype), weight.dtype)
        ops.pack_linear(weight, packed)
        wide.append(packed)
    parts = []
    for m in setting.rows:
        x = (torch.rand(m, k) - 0.5).to(torch.bfloat16)
        ours, theirs = in_turn(
            [
                lambda i: int8.linear_int8(x, *narrow[i % len(narrow)], n),  # noqa: B023
                lambda i: ops.linear(x, wide[i % len(wide)], n),  # noqa: B023
            ],
            setting,
        )
        bandwidth, peak = n * k / ours, 2 * m * n * k / ours
        parts.append(
            f"{m:>5}: {bandwidth / limits[0]:4.0%} {peak / limits[1]:4.0%} x{theirs / ours:4.2f}"
        )
    return f"{n:>6} x {k:<5} " + " |".join(parts)


def main() -> None:
    """Measure the limits, then every shape."""
    setting = settle(make_parser(__doc__, rows="1,2,4,8,16,64,512,2048").parse_args())
    module = native.required()
    operations = module.peak_int8_ops(200_000)
    peak = operations / shortest(lambda _: module.peak_int8_ops(200_000), setting)
    bandwidth = streaming_bandwidth(setting)
    print(heading("int8", setting, bandwidth, f", peak {peak / 1e9:.0f} GOP/s"))
    print("rows: share of the streaming bandwidth, share of the peak, times as fast as bfloat16")
    for model, shapes in setting.shapes.items():
        print(model)
        for shape in shapes:
            print("  " + measure(shape, (bandwidth, peak), setting), flush=True)


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
