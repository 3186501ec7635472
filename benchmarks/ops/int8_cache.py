"""Time one attention layer over int8 caches beside bfloat16 ones, with bfloat16 queries.

    python -m benchmarks.ops.int8_cache [--seconds 0.3] [--isa avx2] [--only decode]

One thread; times are its CPU time, calls take turns, minima are compared. For each shape: milliseconds
over a bfloat16 cache and over an int8 cache, and how many times as fast the second is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.ops.attention import BLOCK_SIZE, LLAMA, SPEC, WINDOW, make_batch
from benchmarks.ops.setting import Setting, in_turn
from pagemill import native
from pagemill.attention.base import AttentionBatch, AttentionSpec
from pagemill.attention.cpu import CPUAttention


def make_call(
    spec: AttentionSpec, batch: AttentionBatch, cache: torch.dtype
) -> Callable[[int], object]:
    """Return one layer's step over caches of random content; calls take several pools in turn."""
    backend = CPUAttention()
    num_blocks = int(batch.block_tables.max()) + 1
    plan, tokens = backend.prepare(batch), batch.query_starts[-1]
    q, k, v = (
        torch.randn(tokens, heads, spec.head_dim).to(torch.bfloat16)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    pools = []
    for _ in range(max(1, min(16, 100_000_000 // (num_blocks * BLOCK_SIZE * spec.head_dim)))):
        pools.append(backend.allocate_kv(spec, num_blocks, BLOCK_SIZE, cache, torch.device("cpu")))
        for pool in pools[-1]:
            if cache == torch.int8:
                pool.random_(-127, 127)  # as scales, some numbers
                pool.view(torch.float32)[pool.view(torch.float32).isnan()] = 1e-3
            else:
                pool.normal_()
    return lambda i: backend.forward(spec, q, k, v, pools[i % len(pools)], plan)


def main() -> None:
    """Run every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--only", default="", help="run the shapes whose names begin with this")
    arguments = parser.parse_args()
    if arguments.isa:
        native.use_isa(arguments.isa)
    torch.set_num_threads(1)
    native.required().set_num_threads(1)
    print(native.describe())
    setting = Setting(threads=1, seconds=arguments.seconds, rows=(), shapes={})
    cases = [
        ("decode 64 x 300", SPEC, make_batch([299] * 64, [1] * 64)),
        ("decode 1 x 8000", SPEC, make_batch([7999], [1])),
        ("decode 64 x 300, Llama 1B", LLAMA, make_batch([299] * 64, [1] * 64)),
        ("decode 1 x 8000, Llama 1B", LLAMA, make_batch([7999], [1])),
        ("prefill 512", SPEC, make_batch([0], [512])),
        ("prefill 2048, Llama 1B", LLAMA, make_batch([0], [2048])),
        ("prefill 2048, window 128", WINDOW, make_batch([0], [2048])),
        ("prefill 512 after 8000", SPEC, make_batch([8000], [512])),
    ]
    for name, spec, batch in cases:
        if not name.startswith(arguments.only):
            continue
        calls = [make_call(spec, batch, cache) for cache in (torch.bfloat16, torch.int8)]
        wide, narrow = in_turn(calls, setting)
        print(f"{name:28} {wide * 1e3:9.3f} ms {narrow * 1e3:9.3f} ms  x{wide / narrow:.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
