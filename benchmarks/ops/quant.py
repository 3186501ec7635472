"""Time products with packed weights against the same shapes in bfloat16, one after the other in turn.

    python -m benchmarks.ops.quant [--threads 1] [--isa avx2] [--seconds 0.2] [--rows 1,4,16,64,512] [--formats int4,int8]

Each line is one matrix of Llama-3.2-1B and one format; for each number of rows: how many times as fast as the
bfloat16 layer, and the packed bytes read a second as a share of this machine's streaming bandwidth,
measured in the same run. Weights come from memory: as many copies as fill 300 MB are used in turn.
Times are minima; with one thread of its CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops.linear import SHAPES, shortest
from pagemill import native
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as dense
from pagemill.ops.cpu_quant import NativeProduct
from pagemill.ops.packed import PackedMatrix, pack

# name -> codec, group, offset
FORMATS = {
    "int4": ("int4", 32, "none"),
    "int4-g64z": ("int4", 64, "zero"),
    "int4-g32m": ("int4", 32, "min"),
    "int4-g128": ("int4", 128, "none"),
    "int8": ("int8", 32, "none"),
    "int8-g16": ("int8", 16, "none"),
    "int8-row": ("int8", 1 << 20, "none"),
    "fp8": ("fp8", 128, "none"),
}
_COPIES_BYTES = 300_000_000


def made_up(name: str, n: int, k: int) -> PackedMatrix:
    """Return a matrix of random codes."""
    codec, group, offset = FORMATS[name]
    groups = -(-k // group)
    codes = torch.randint(0, 16 if codec == "int4" else 120, (n, k), dtype=torch.uint8)
    scales = torch.rand(n, groups) * 0.01
    given = None if offset == "none" else torch.randint(0, 16, (n, groups)).float()
    mins, zeros = (given, None) if offset == "min" else (None, given)
    if codec == "int8":
        codes = codes.view(torch.int8)
    return pack(codes, scales, codec=codec, group=group, mins=mins, zeros=zeros)


def streaming_bandwidth(clock: Callable[[], float]) -> float:
    """Return the bytes a second that this machine reads from memory."""
    size = 400_000_000
    memory = torch.ones(size // 8, dtype=torch.int64)
    module = native.required()
    return size / shortest(lambda _: module.read_memory(memory.data_ptr(), size), 1.0, clock)


def measure(
    shape: tuple[int, int], names: list[str], rows: list[int], bandwidth: float, seconds: float,
    clock: Callable[[], float],
) -> None:  # fmt: skip
    """Print one shape's figures."""
    n, k = shape
    plain: list[Tensor] = []
    for _ in range(max(1, _COPIES_BYTES // (2 * n * k))):
        packed = torch.empty(dense.packed_shape(n, k, torch.bfloat16), dtype=torch.bfloat16)
        dense.pack_linear((torch.rand(n, k) - 0.5).bfloat16(), packed)
        plain.append(packed)
    for name in names:
        first = made_up(name, n, k)
        size = first.size_bytes()
        products = [NativeProduct(first)]
        for _ in range(_COPIES_BYTES // size):
            copies = {key: tensor.clone() for key, tensor in first.tensors().items()}
            products.append(
                NativeProduct(
                    PackedMatrix(
                        first.format, n, k, 1, copies["codes"], copies["scales"],
                        copies.get("offsets"), copies["multipliers"],
                    )
                )
            )  # fmt: skip
        parts = []
        for m in rows:
            x = (torch.rand(m, k) - 0.5).bfloat16()
            ours = theirs = float("inf")
            for _ in range(3):
                took = shortest(
                    lambda i: products[i % len(products)].apply(x),  # noqa: B023
                    seconds / 3, clock,
                )  # fmt: skip
                ours = min(ours, took)
                took = shortest(
                    lambda i: dense.linear(x, plain[i % len(plain)], n),  # noqa: B023
                    seconds / 3, clock,
                )  # fmt: skip
                theirs = min(theirs, took)
            parts.append(f"{m:>5}: x{theirs / ours:4.2f} {size / ours / bandwidth:4.0%}")
        print(f"  {n:>6} x {k:<5} {name:<10} " + " |".join(parts), flush=True)


def main() -> None:
    """Measure the bandwidth, then every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--formats", default="int4,int8,fp8")
    parser.add_argument("--shapes", default="", help="such as 2048x2048,2048x8192")
    arguments = parser.parse_args()
    module = native.required()
    if arguments.isa:
        native.use_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    module.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    bandwidth = streaming_bandwidth(clock)
    print(
        f"{module.active_isa()}, {arguments.threads} threads: streaming {bandwidth / 1e9:.1f} GB/s\n"
        "rows: times as fast as bfloat16, share of the streaming bandwidth"
    )
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shapes.split(",") if s]
    for shape in shapes or dict.fromkeys(SHAPES["Llama-3.2-1B"]):
        measure(
            (shape[0], shape[1]), arguments.formats.split(","),
            [int(word) for word in arguments.rows.split(",")], bandwidth, arguments.seconds, clock,
        )  # fmt: skip


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
