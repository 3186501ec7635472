"""Time one attention layer of the plain-torch backend: decode, prefill and a mixed step.

    python -m benchmarks.ops.attention [--threads 2] [--repeats 10]

Each line is one `forward` call with a prepared plan, the best and the median of the repeats. Shapes are
SmolLM2-135M's: 9 query and 3 key heads of 64, blocks of 16.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBatch, AttentionSpec

BLOCK_SIZE = 16
SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
WINDOW = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, sliding_window=128)


def make_batch(contexts: list[int], counts: list[int], seed: int = 0) -> AttentionBatch:
    """Return a step with blocks in random order."""
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(counts), max(blocks), dtype=torch.int64)
    slots, starts, used = [], [0], 0
    for i, count in enumerate(counts):
        tables[i, : blocks[i]] = order[used : used + blocks[i]]
        used += blocks[i]
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


def measure(
    name: str, spec: AttentionSpec, batch: AttentionBatch, dtype: torch.dtype, repeats: int
) -> None:
    """Print the time of one layer and of preparing the step."""
    backend = BACKENDS.load("torch")()
    num_blocks = int(batch.block_tables.max()) + 1
    kv = backend.allocate_kv(spec, num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
    for pool in kv:
        pool.normal_()
    tokens = batch.query_starts[-1]
    q = torch.randn(tokens, spec.num_heads, spec.head_dim).to(dtype)
    k, v = (torch.randn(tokens, spec.num_kv_heads, spec.head_dim).to(dtype) for _ in range(2))
    first, layers = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        plan = backend.prepare(batch)
        backend.forward(spec, q, k, v, kv, plan)
        first.append(time.perf_counter() - start)
        start = time.perf_counter()
        backend.forward(spec, q, k, v, kv, plan)
        layers.append(time.perf_counter() - start)
    plan_ms = max(0.0, statistics.median(first) - statistics.median(layers)) * 1e3
    print(
        f"{name:34} {str(dtype)[6:]:9} layer {min(layers) * 1e3:8.2f} ms "
        f"(median {statistics.median(layers) * 1e3:8.2f})  plan {plan_ms:6.2f} ms"
    )


def main() -> None:
    """Run every shape in float32 and bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randint(32, 768, (64,), generator=generator).tolist()
    cases = [
        ("decode 64 x 300", SPEC, make_batch([299] * 64, [1] * 64)),
        ("decode 64 x 32-768", SPEC, make_batch(mixed, [1] * 64)),
        ("decode 64 x 32-768, window 128", WINDOW, make_batch(mixed, [1] * 64)),
        ("decode 1 x 300", SPEC, make_batch([299], [1])),
        ("decode 1 x 16000", SPEC, make_batch([15999], [1])),
        ("prefill 512", SPEC, make_batch([0], [512])),
        ("prefill 2048", SPEC, make_batch([0], [2048])),
        ("prefill 2048, window 128", WINDOW, make_batch([0], [2048])),
        ("prefill 16 x 128", SPEC, make_batch([0] * 16, [128] * 16)),
        ("prefill 512 after 8000", SPEC, make_batch([8000], [512])),
        ("64 decodes x 300 and prefill 448", SPEC, make_batch([299] * 64 + [0], [1] * 64 + [448])),
    ]
    with torch.inference_mode():
        for name, spec, batch in cases:
            for dtype in (torch.float32, torch.bfloat16):
                measure(name, spec, batch, dtype, arguments.repeats)


if __name__ == "__main__":
    main()
