"""The bound that memory planning uses, against what torch's allocator counts during a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pagemill.attention.base import AttentionBatch, AttentionSpec
from tests.attention.kernels import KERNELS, make_backend


def _peak(run: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at one time while `run` ran, over those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = most = 0
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    assert changes
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _batch(contexts: list[int], counts: list[int], block_size: int) -> AttentionBatch:
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    width = -(-max(lengths) // block_size)
    # All sequences share the same blocks: what they hold does not matter here.
    tables = torch.arange(width).expand(len(counts), width)
    starts, slots = [0], []
    for context, length in zip(contexts, lengths, strict=True):
        starts.append(starts[-1] + length - context)
        slots.append(torch.arange(context, length))
    return AttentionBatch(
        query_starts=tuple(starts),
        num_computed=tuple(contexts),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        block_size=block_size,
    )


STEPS = {
    "decode": ([300] * 64, [1] * 64),
    "decode of many lengths": (list(range(5, 1000, 20)), [1] * 50),
    "decode of very many": ([40] * 1000, [1] * 1000),
    "prefill": ([0], [1500]),
    "chunk after a context": ([3000], [512]),
    "chunk after a long context": ([9000], [100]),
    "mixed": ([300] * 20 + [0, 100], [1] * 20 + [700, 64]),
    "short prompts": ([0] * 40, [30] * 40),
}
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "sliding_window": 100},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "logit_softcap": 5.0},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "sliding_window": 512},
]


@pytest.mark.parametrize("kernels", ["torch", KERNELS[-1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("name", sorted(STEPS))
def test_no_step_takes_more_than_peak_bytes(
    kernels: str, name: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = AttentionSpec(scale=0.1, **shape)
    contexts, counts = STEPS[name]
    batch = _batch(contexts, counts, 16)
    tokens = batch.query_starts[-1]
    longest = max(context + count for context, count in zip(contexts, counts, strict=True))
    backend = make_backend(kernels)
    kv = backend.allocate_kv(spec, -(-longest // 16), 16, dtype, torch.device("cpu"))
    fused = torch.zeros(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=dtype)
    q, k, v = fused.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    for sinks in (None, torch.zeros(spec.num_heads)):

        def run(sinks: torch.Tensor | None = sinks) -> object:
            return backend.forward(spec, q, k, v, kv, backend.prepare(batch), sinks)

        bound = backend.peak_bytes(spec, tokens, len(counts), longest, dtype, block_size=16)
        taken = _peak(run)
        assert taken <= bound
        # The result alone must be in it, or the count does not count.
        assert taken >= q.numel() * q.element_size()


@pytest.mark.parametrize("kernels", ["torch", KERNELS[-1]])
def test_bound_does_not_grow_with_the_square_of_the_length(kernels: str) -> None:
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
    bounds = [
        make_backend(kernels).peak_bytes(spec, 2048, 64, length, torch.bfloat16, block_size=16)
        for length in (8192, 131072)
    ]
    assert bounds[0] < 200 << 20
    # Beyond it only the indices of the blocks grow.
    assert bounds[1] - bounds[0] <= 8 * 8 * 64 * (131072 - 8192) // 16 + (1 << 20)
