"""Time the native linear layer against the machine's own limits and against torch.

    python -m benchmarks.ops.linear [--threads 1] [--isa avx2] [--seconds 0.2] [--rows 1,4,16] [--dtypes bfloat16]

Each line is one matrix of a model: for each number of rows the weight bytes read a second as a share of
this machine's streaming bandwidth, the operations a second as a share of its register-only peak, and the
ratio to torch's `F.linear` (above 1: faster). Limits are measured in the same run; weights lie where an
engine puts them and come from memory, not from a cache: as many copies as fill 200 MB are used in turn.
Times are the minimum of a short run, with one thread of its CPU time: what other processes take does not
count, what they do to the caches and to memory does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.ops.setting import (
    COPIES_BYTES,
    Setting,
    heading,
    make_parser,
    settle,
    shortest,
    streaming_bandwidth,
)
from pagemill import native
from pagemill.device.host_memory import lazy_zeros
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as ops


def measure(
    shape: tuple[int, int], dtype: torch.dtype, limits: tuple[float, float], setting: Setting
) -> str:
    """Return one shape's figures."""
    n, k = shape
    weight = (torch.rand(n, k) - 0.5).to(dtype)
    size = n * k * dtype.itemsize
    copies = []
    for _ in range(max(1, COPIES_BYTES // size)):
        packed = lazy_zeros(ops.packed_shape(n, k, dtype), dtype)
        ops.pack_linear(weight, packed)
        copies.append(packed)
    plain = [weight.clone() for _ in copies]
    parts = []
    for m in setting.rows:
        x = (torch.rand(m, k) - 0.5).to(dtype)
        ours = shortest(lambda i: ops.linear(x, copies[i % len(copies)], n), setting)  # noqa: B023
        theirs = shortest(lambda i: F.linear(x, plain[i % len(plain)]), setting)  # noqa: B023
        bandwidth, peak = size / ours, 2 * m * n * k / ours
        parts.append(
            f"{m:>5}: {bandwidth / limits[0]:4.0%} {peak / limits[1]:4.0%} x{theirs / ours:4.2f}"
        )
    return f"{n:>6} x {k:<5} " + " |".join(parts)


def main() -> None:
    """Measure the limits, then every shape."""
    parser = make_parser(__doc__, rows="1,2,4,8,16,32,64,128,256,512,1024,2048")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    arguments = parser.parse_args()
    setting, module = settle(arguments), native.required()
    for name in arguments.dtypes.split(","):
        dtype = getattr(torch, name)
        code = 0 if dtype == torch.float32 else 1
        operations = module.peak_flops(code, 0) + module.peak_flops(code, 200_000)
        peak = operations / shortest(lambda _: module.peak_flops(code, 200_000), setting)  # noqa: B023
        bandwidth = streaming_bandwidth(setting)
        print("\n" + heading(name, setting, bandwidth, f", peak {peak / 1e9:.0f} GFLOP/s"))
        print("rows: share of the streaming bandwidth, share of the peak, times as fast as torch")
        for model, shapes in setting.shapes.items():
            print(model)
            for shape in shapes:
                print("  " + measure(shape, dtype, (bandwidth, peak), setting), flush=True)


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
