"""Time products with packed weights against the same shapes in bfloat16, one after the other in turn.

    python -m benchmarks.ops.quant [--threads 1] [--isa avx2] [--seconds 0.2] [--rows 1,4,16,64,512] [--formats int4,int8]

Each line is one matrix of a model and one format; for each number of rows: how many times as fast as the
bfloat16 layer, and the packed bytes read a second as a share of this machine's streaming bandwidth,
measured in the same run. Weights come from memory: as many copies as fill 200 MB are used in turn.
Times are minima; with one thread of its CPU time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.ops.setting import (
    COPIES_BYTES,
    Setting,
    heading,
    in_turn,
    make_parser,
    settle,
    streaming_bandwidth,
)
from pagemill.device.host_memory import lazy_zeros
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


def measure(shape: tuple[int, int], names: list[str], bandwidth: float, setting: Setting) -> None:
    """Print one shape's figures."""
    n, k = shape
    plain: list[Tensor] = []
    for _ in range(max(1, COPIES_BYTES // (2 * n * k))):
        packed = lazy_zeros(dense.packed_shape(n, k, torch.bfloat16), torch.bfloat16)
        dense.pack_linear((torch.rand(n, k) - 0.5).bfloat16(), packed)
        plain.append(packed)
    for name in names:
        products = copies_of(made_up(name, n, k))
        size = products[0].matrix.size_bytes()
        parts = []
        for m in setting.rows:
            x = (torch.rand(m, k) - 0.5).bfloat16()
            ours, theirs = in_turn(
                [
                    lambda i: products[i % len(products)].apply(x),  # noqa: B023
                    lambda i: dense.linear(x, plain[i % len(plain)], n),  # noqa: B023
                ],
                setting,
            )
            parts.append(f"{m:>5}: x{theirs / ours:4.2f} {size / ours / bandwidth:4.0%}")
        print(f"  {n:>6} x {k:<5} {name:<10} " + " |".join(parts), flush=True)


def copies_of(matrix: PackedMatrix) -> list[NativeProduct]:
    """Return as many copies as fill memory, where an engine puts them."""

    def copy(tensor: Tensor) -> Tensor:
        return lazy_zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    products = []
    for _ in range(max(1, COPIES_BYTES // matrix.size_bytes())):
        tensors = {name: copy(tensor) for name, tensor in matrix.tensors().items()}
        products.append(
            NativeProduct(
                PackedMatrix(
                    matrix.format, matrix.out_features, matrix.in_features, 1, tensors["codes"],
                    tensors["scales"], tensors.get("offsets"), tensors["multipliers"],
                )
            )
        )  # fmt: skip
    return products


def main() -> None:
    """Measure the bandwidth, then every shape."""
    parser = make_parser(__doc__, rows="1,4,16,64,512")
    parser.add_argument("--formats", default="int4,int8,fp8")
    parser.add_argument("--shapes", default="", help="instead of models, such as 2048x2048")
    arguments = parser.parse_args()
    setting = settle(arguments)
    bandwidth = streaming_bandwidth(setting)
    print(heading("packed weights", setting, bandwidth))
    print("rows: times as fast as bfloat16, share of the streaming bandwidth")
    given = [tuple(map(int, s.split("x"))) for s in arguments.shapes.split(",") if s]
    shapes = {"": tuple((n, k) for n, k in given)} if given else setting.shapes
    for model, of_model in shapes.items():
        print(model)
        for shape in of_model:
            measure(shape, arguments.formats.split(","), bandwidth, setting)


if __name__ == "__main__":
    shorten_idle_spinning()
    with torch.inference_mode():
        main()
