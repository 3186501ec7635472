"""Time one attention layer of every backend, in turn: decode, prefill and a mixed step.

    python -m benchmarks.ops.attention [--threads 2] [--repeats 10] [--only decode] [--dtypes bfloat16]

A line is one shape and dtype: for each backend the best time of one `forward` call with a prepared plan
and the time of preparing it; for the native one its speed, and how many times plain torch's that is.
Decode is bound by memory (bytes of keys and values that are read), prefill by arithmetic (products and
sums of the keys that are seen). Backends take turns in every repeat, so that a busy machine disturbs
both; a step goes through several caches, so that no processor's cache holds them. Whole prompts are also
given to torch's `scaled_dot_product_attention`, whose keys and values lie side by side and not in
blocks: what it takes is in units of the native one's time. Long prompts go without the plain backend,
whose scores would not fit. Shapes are SmolLM2-135M's, 9 query and 3 key heads of 64, Llama-3.2-1B's, 32
and 8 of 64, and Qwen3-0.6B's, 16 and 8 of 128; blocks of 16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagemill import native
from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBackend, AttentionBatch, AttentionSpec

BLOCK_SIZE = 16
_CACHED_BYTES = 100_000_000  # several times what a processor's caches hold
_LONG = 4096  # prompts that plain torch is not asked for
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125)
QWEN = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
WINDOW = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, sliding_window=128)


def make_batch(
    contexts: list[int], counts: list[int], seed: int = 0, num_shared: int = 0
) -> AttentionBatch:
    """Return a step with blocks in random order; all sequences share those of `num_shared` tokens."""
    common = num_shared // BLOCK_SIZE
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(counts), max(blocks), dtype=torch.int64)
    slots, starts, used = [], [0], 0
    for i, count in enumerate(counts):
        own = blocks[i] - common
        tables[i, :common] = order[:common]
        tables[i, common : blocks[i]] = order[common + used : common + used + own]
        used += own
        positions = torch.arange(contexts[i], lengths[i])
        slots.append(tables[i, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        starts.append(starts[-1] + count)
    return AttentionBatch(
        query_starts=tuple(starts),
        num_computed=tuple(contexts),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        block_size=BLOCK_SIZE,
    )


@dataclass
class Runner:
    """One backend at work on one step."""

    backend: AttentionBackend
    spec: AttentionSpec
    batch: AttentionBatch
    inputs: tuple[Tensor, Tensor, Tensor]
    kvs: list[tuple[Tensor, Tensor]]  # taken in turn
    plans: list[float]
    layers: list[float]

    def run(self) -> None:
        """Time preparing with a first layer, and a layer of every cache."""
        start = time.perf_counter()
        plan = self.backend.prepare(self.batch)
        self.backend.forward(self.spec, *self.inputs, self.kvs[-1], plan)
        middle = time.perf_counter()
        for kv in self.kvs:
            self.backend.forward(self.spec, *self.inputs, kv, plan)
        layer = (time.perf_counter() - middle) / len(self.kvs)
        self.layers.append(layer)
        self.plans.append(middle - start - layer)


def make_runner(
    name: str, spec: AttentionSpec, batch: AttentionBatch, dtype: torch.dtype
) -> Runner:
    """Return a backend with a full cache and random queries."""
    backend = BACKENDS.load(name)()
    num_blocks = int(batch.block_tables.max()) + 1
    width = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    kvs = []
    for _ in range(max(1, min(64, _CACHED_BYTES // (num_blocks * BLOCK_SIZE * width)))):
        kvs.append(backend.allocate_kv(spec, num_blocks, BLOCK_SIZE, dtype, torch.device("cpu")))
        for pool in kvs[-1]:
            pool.normal_()
    tokens = batch.query_starts[-1]
    q, k, v = (
        torch.randn(tokens, heads, spec.head_dim).to(dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    return Runner(backend, spec, batch, (q, k, v), kvs, [], [])


def keys_seen(spec: AttentionSpec, batch: AttentionBatch) -> tuple[int, int]:
    """Return the keys that sequences read, and the keys that queries see, over the step."""
    window = spec.sliding_window or 1 << 60
    read = seen = 0
    for seq, context in enumerate(batch.num_computed):
        count = batch.query_starts[seq + 1] - batch.query_starts[seq]
        read += min(context + count, window + count - 1)
        seen += sum(min(position + 1, window) for position in range(context, context + count))
    return read, seen


def time_dense(runner: Runner) -> float:
    """Return the seconds of torch's fused attention over a whole prompt without a cache."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in runner.inputs)
    start = time.perf_counter()
    scaled_dot_product_attention(q, k, v, is_causal=True, scale=runner.spec.scale, enable_gqa=True)
    return time.perf_counter() - start


def measure(
    name: str, spec: AttentionSpec, batch: AttentionBatch, dtype: torch.dtype, repeats: int
) -> None:
    """Print the time of one layer and of preparing the step, for each backend."""
    names = ["torch"] if native.extension() is None else ["torch", "cpu"]
    if len(names) == 2 and batch.query_starts[1] > _LONG:
        names = ["cpu"]
    whole = batch.num_computed == (0,) and spec.sliding_window is None
    dense = []
    runners = [make_runner(backend, spec, batch, dtype) for backend in names]
    for _ in range(repeats):
        for runner in runners:
            runner.run()
        if whole:
            dense.append(time_dense(runners[-1]))
    line = f"{name:34} {str(dtype)[6:]:9}"
    for backend, runner in zip(names, runners, strict=True):
        plan_us = max(0.0, statistics.median(runner.plans)) * 1e6
        line += f" {backend:>6} {min(runner.layers) * 1e3:8.3f} ms, plan {plan_us:6.0f} us"
    read, seen = keys_seen(spec, batch)
    best = min(runners[-1].layers)
    size = 2 * read * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    flops = 4 * seen * spec.num_heads * spec.head_dim
    line += f"  {size / best / 1e9:6.1f} GB/s {flops / best / 1e9:7.1f} GFLOP/s"
    if len(runners) == 2:
        line += f"  x{min(runners[0].layers) / best:.1f}"
    if dense:
        line += f"  fused torch x{min(dense) / best:.2f}"
    print(line, flush=True)


def main() -> None:
    """Run every shape in float32 and bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", default="", help="run the shapes whose names begin with this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    extension = native.extension()
    if extension is not None:
        extension.set_num_threads(arguments.threads)
    print(f"kernels: {native.describe()}; threads: {arguments.threads}")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randint(32, 768, (64,), generator=generator).tolist()
    cases = [
        ("decode 64 x 300", SPEC, make_batch([299] * 64, [1] * 64)),
        ("decode 64 x 32-768", SPEC, make_batch(mixed, [1] * 64)),
        ("decode 64 x 32-768, window 128", WINDOW, make_batch(mixed, [1] * 64)),
        ("decode 1 x 300", SPEC, make_batch([299], [1])),
        ("decode 1 x 8000", SPEC, make_batch([7999], [1])),
        ("decode 64 x 300, Llama 1B", LLAMA, make_batch([299] * 64, [1] * 64)),
        ("decode 1 x 8000, Llama 1B", LLAMA, make_batch([7999], [1])),
        ("decode 1 x 16000", SPEC, make_batch([15999], [1])),
        ("decode 1 x 128, Qwen3 0.6B", QWEN, make_batch([127], [1])),
        ("decode 1 x 2048, Qwen3 0.6B", QWEN, make_batch([2047], [1])),
        ("decode 1 x 8192, Qwen3 0.6B", QWEN, make_batch([8191], [1])),
        ("decode 16 x 2048, Qwen3 0.6B", QWEN, make_batch([2047] * 16, [1] * 16)),
        ("decode 16 x 576, Qwen3 0.6B", QWEN, make_batch([575] * 16, [1] * 16)),
        (
            "decode 16 x 576, 512 shared",
            QWEN,
            make_batch([575] * 16, [1] * 16, num_shared=512),
        ),
        (
            "decode 16 x 2048, 1984 shared",
            QWEN,
            make_batch([2047] * 16, [1] * 16, num_shared=1984),
        ),
        ("prefill 512", SPEC, make_batch([0], [512])),
        ("prefill 2048", SPEC, make_batch([0], [2048])),
        ("prefill 2048, Llama 1B", LLAMA, make_batch([0], [2048])),
        ("prefill 2048, Qwen3 0.6B", QWEN, make_batch([0], [2048])),
        ("prefill 8192, Qwen3 0.6B", QWEN, make_batch([0], [8192])),
        ("prefill 32768, Qwen3 0.6B", QWEN, make_batch([0], [32768])),
        ("prefill 2048, window 128", WINDOW, make_batch([0], [2048])),
        ("prefill 16 x 128", SPEC, make_batch([0] * 16, [128] * 16)),
        ("prefill 512 after 8000", SPEC, make_batch([8000], [512])),
        ("64 decodes x 300 and prefill 448", SPEC, make_batch([299] * 64 + [0], [1] * 64 + [448])),
    ]
    with torch.inference_mode():
        for name, spec, batch in cases:
            if not name.startswith(arguments.only):
                continue
            for dtype in arguments.dtypes.split(","):
                measure(name, spec, batch, _DTYPES[dtype], arguments.repeats)


if __name__ == "__main__":
    main()
