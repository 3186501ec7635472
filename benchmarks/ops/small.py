"""Time the small operations of a layer and the sampler, native against plain, in turn.

    python -m benchmarks.ops.small [--threads 1] [--seconds 0.2]

Each line is one operation at one size: microseconds of both (the least of a short run) and their ratio.
Layers have the sizes of SmolLM2-135M (hidden 576, 12 heads of 64) and Qwen3-0.6B (hidden 1024, 24 heads
of 128, normed); vocabularies are SmolLM2's, Qwen3's and Gemma 3's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pagemill import native
from pagemill.messages import SamplingSpec
from pagemill.ops.base import HeadNorm, HeadShape, LayerOps, Rotation
from pagemill.ops.cpu_layers import NativeOps
from pagemill.ops.plain import PlainOps
from pagemill.sampling.native_rows import NativeRows
from pagemill.sampling.row_math import NumpyRows, RowMath, SampleRow


def compare(name: str, calls: dict[str, Callable[[], object]], seconds: float) -> None:
    """Run both in turn and print the least times."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            least[key] = min(least[key], time.perf_counter() - start)
    plain, own = (least[key] * 1e6 for key in ("plain", "native"))
    print(
        f"{name:58s} plain {plain:10.1f} us  native {own:9.1f} us  {plain / own:6.1f}x", flush=True
    )


def layer_operations(seconds: float) -> None:
    """Compare what layers use."""
    sides: dict[str, LayerOps] = {"plain": PlainOps(), "native": NativeOps()}
    for dtype in (torch.bfloat16, torch.float32):
        for hidden, shape, normed in (
            (576, HeadShape(9, 3, 64), False),
            (1024, HeadShape(16, 8, 128), True),
        ):
            width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            weight = torch.ones(hidden, dtype=dtype)
            heads = torch.ones(shape.num_heads + shape.num_kv_heads, shape.head_dim, dtype=dtype)
            norm = HeadNorm(heads, 1e-6, 0.0) if normed else None
            for rows in (1, 64, 2048):
                x, qkv = (torch.randn(rows, size).to(dtype) for size in (hidden, width))
                angles = torch.rand(rows, shape.head_dim // 2)
                turn = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), "neox")
                title = f"{str(dtype)[6:]} {rows} x"
                calls = {key: partial(ops.rms_norm, x, weight, 1e-6) for key, ops in sides.items()}
                compare(f"rms_norm {title} {hidden}", calls, seconds)
                calls = {
                    key: partial(ops.split_heads, qkv, shape, norm, turn)
                    for key, ops in sides.items()
                }
                name = "norm and rotation" if normed else "rotation"
                compare(f"{name} {title} {width}", calls, seconds)


def sampling(seconds: float) -> None:
    """Compare what the sampler uses."""
    sides: dict[str, RowMath] = {"plain": NumpyRows(), "native": NativeRows()}
    kinds = ({}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05})
    for vocab in (49_152, 151_936, 262_144):
        for rows in (1, 16):
            numbers = np.random.default_rng(0).standard_normal((rows, vocab)) * 2.5
            logits = numbers.astype(np.float32)
            title = f"{rows} x {vocab}"
            calls = {key: partial(math.best, logits) for key, math in sides.items()}
            compare(f"argmax {title}", calls, seconds)
            highest = logits.max(axis=1)
            for kind in kinds:
                spec = SamplingSpec(temperature=0.8, seed=1, **kind)
                of_rows = [SampleRow(spec, np.zeros(9, np.int32), 9, 0, 1)] * rows
                calls = {
                    key: partial(math.draw, logits, highest, range(rows), of_rows)
                    for key, math in sides.items()
                }
                words = " ".join(f"{k} {v}" for k, v in kind.items()) or "no truncation"
                compare(f"draw, {words}, {title}", calls, seconds)
            calls = {
                key: partial(math.score, logits, [(7,)] * rows, [20] * rows, normalize=True)
                for key, math in sides.items()
            }
            compare(f"logprobs and 20 alternatives {title}", calls, seconds)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.required().set_num_threads(arguments.threads)
    with torch.inference_mode():
        layer_operations(arguments.seconds)
        sampling(arguments.seconds)


if __name__ == "__main__":
    main()
