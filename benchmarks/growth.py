"""How a decode step's time grows with sequences and context, beside what explains it.

    python -m benchmarks.growth [--layers 28] [--threads 2] [--sequences 1,4,16,64] [--contexts 128,2048,8192]

The model has Qwen3-0.6B's shape and made-up bfloat16 weights. A step of n sequences at one context is
run by the worker itself: their tokens count as computed, and the cache is filled beforehand. Each time
stands beside the sum of three bounds, whose terms are measured in the same run: weight bytes by the
streaming bandwidth, bytes of keys and values by the same, and operations by the register-only peak. A
ratio near 1 means that nothing else costs anything; a step between neighbours would be a cliff. Prints
the table and writes a picture.

The whole model's cache takes 112 KiB a token: what does not fit in memory is named and left out. With
`--layers 4` everything fits in 24 GiB; the shares of attention and linear layers stay as they are, that
of the head grows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pagemill import EngineArgs, native
from pagemill.device.host_memory import lazy_zeros
from pagemill.engine.resolve import resolve
from pagemill.env import shorten_idle_spinning
from pagemill.messages import (
    NewSequence,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
)
from pagemill.worker.worker import Worker

BLOCK_SIZE = 16
NUM_WARM_UP = 2
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
# Of each layer: qkv, out, gate and up, down; and the head.
_LAYER_WEIGHTS = 4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072
_HEAD_WEIGHTS = 151_936 * 1024
_KV_NUMBERS = 2 * 8 * 128  # a token and layer
_SCORE_FLOPS = 4 * 16 * 128  # a key that is seen, and layer


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured with the threads that the model uses."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step and the bounds of its parts, in milliseconds."""

    sequences: int
    context: int
    step_ms: float
    weights_ms: float
    kv_ms: float
    compute_ms: float

    @property
    def bound_ms(self) -> float:
        """Return the sum of the bounds."""
        return self.weights_ms + self.kv_ms + self.compute_ms


def measure_limits(threads: int) -> Limits:
    """Return streaming bandwidth and bfloat16 peak, each the best of a few runs."""
    module = native.required()
    module.set_num_threads(threads)
    size = 400_000_000
    memory = lazy_zeros((size // 8,), torch.int64).fill_(1)
    reads, products = [], []
    flops = 0.0
    for _ in range(15):
        start = time.perf_counter()
        module.read_memory(memory.data_ptr(), size)
        middle = time.perf_counter()
        flops = module.peak_flops(1, 300_000)
        reads.append(middle - start)
        products.append(time.perf_counter() - middle)
    return Limits(size / min(reads), flops / min(products))


def make_worker(layers: int, threads: int, tokens: int, context: int, sequences: int) -> Worker:
    """Return a worker with made-up weights whose cache holds `tokens` tokens and is full of numbers."""
    with tempfile.TemporaryDirectory() as folder:
        config = QWEN3 | {"num_hidden_layers": layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        worker = Worker(
            resolve(
                EngineArgs(
                    model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                    block_size=BLOCK_SIZE, num_threads=threads, max_num_seqs=sequences,
                    max_model_len=context, max_num_batched_tokens=max(context, 2048),
                    kv_cache_memory_bytes=tokens * layers * _KV_NUMBERS * 2,
                )
            )
        )  # fmt: skip
    pattern = torch.randn(1 << 20).bfloat16()
    for pair in worker.kv.layers:
        for pool in pair:
            for part in pool.view(-1).split(len(pattern)):
                part.copy_(pattern[: len(part)])
    return worker


def run_steps(worker: Worker, sequences: int, context: int, steps: int) -> float:
    """Return the milliseconds of the fastest decode step of `sequences` at about `context` tokens."""
    per_sequence = -(-(context + NUM_WARM_UP + steps) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(worker.kv.num_blocks, generator=generator).tolist()
    spec = SamplingSpec(temperature=0.0)
    new = tuple(
        NewSequence(
            i, str(i), tuple((7 * i + j) % 30_000 for j in range(context)), context, 0, spec
        )
        for i in range(sequences)
    )
    times = []
    for step in range(NUM_WARM_UP + steps):
        scheduled = tuple(
            ScheduledSequence(
                i, context - 1 + step, 1, 0,
                tuple(blocks[i * per_sequence : (i + 1) * per_sequence]) if step == 0 else (), 1,
            )
            for i in range(sequences)
        )  # fmt: skip
        message = SchedulerOutput(
            step_id=step, scheduled=scheduled, new_sequences=new if step == 0 else ()
        )
        start = time.perf_counter()
        worker.execute(message)
        times.append(time.perf_counter() - start)
    worker.execute(
        SchedulerOutput(step_id=0, scheduled=(), removed_seq_ids=tuple(range(sequences)))
    )
    return 1e3 * min(times[NUM_WARM_UP:])


def make_point(layers: int, limits: Limits, sequences: int, context: int, step_ms: float) -> Point:
    """Return the step with its bounds."""
    weights = layers * _LAYER_WEIGHTS + _HEAD_WEIGHTS
    keys = sequences * context * layers
    flops = 2 * weights * sequences + _SCORE_FLOPS * keys
    return Point(
        sequences, context, step_ms,
        1e3 * 2 * weights / limits.bytes_per_s,
        1e3 * 2 * _KV_NUMBERS * keys / limits.bytes_per_s,
        1e3 * flops / limits.flops_per_s,
    )  # fmt: skip


def print_point(point: Point) -> None:
    """Print one line of the table."""
    print(
        f"{point.sequences:9} {point.context:8} {point.step_ms:9.2f} {point.weights_ms:9.2f} "
        f"{point.kv_ms:9.2f} {point.compute_ms:9.2f} {point.step_ms / point.bound_ms:9.2f}",
        flush=True,
    )


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw measured times as lines and their bounds as dashes, one colour a context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_subplot()
    for i, context in enumerate(sorted({point.context for point in points})):
        mine = [point for point in points if point.context == context]
        counts = [point.sequences for point in mine]
        axes.plot(
            counts, [p.step_ms for p in mine], "o-", color=f"C{i}", label=f"{context} tokens each"
        )
        axes.plot(counts, [p.bound_ms for p in mine], "--", color=f"C{i}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences")
    axes.set_ylabel("decode step, ms (dashes: sum of the bounds)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure the limits, then every step, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", default="1,4,16,64")
    parser.add_argument("--contexts", default="128,2048,8192")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cache-gib", type=float, default=12.0, help="most memory of the cache")
    parser.add_argument("--png", type=Path, default=Path("benchmarks/growth.png"))
    arguments = parser.parse_args()
    sequences = [int(word) for word in arguments.sequences.split(",")]
    contexts = [int(word) for word in arguments.contexts.split(",")]
    layers, room = arguments.layers, NUM_WARM_UP + arguments.steps + BLOCK_SIZE
    most = int(arguments.cache_gib * 2**30) // (layers * _KV_NUMBERS * 2)
    cases = [(n, context) for context in contexts for n in sequences]
    fitting = [case for case in cases if case[0] * (case[1] + room) <= most]
    for n, context in cases:
        if (n, context) not in fitting:
            print(f"left out: {n} sequences of {context} tokens need more than --cache-gib")
    limits = measure_limits(arguments.threads)
    print(
        f"{native.describe()}, {layers} layers, {arguments.threads} threads: streaming "
        f"{limits.bytes_per_s / 1e9:.1f} GB/s, peak {limits.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    tokens = max(n * (context + room) for n, context in fitting)
    worker = make_worker(layers, arguments.threads, tokens, max(contexts) + room, max(sequences))
    print("sequences  context   step ms   weights        kv   compute   step / sum of bounds")
    points = []
    for n, context in fitting:
        step_ms = run_steps(worker, n, context, arguments.steps)
        points.append(make_point(layers, limits, n, context, step_ms))
        print_point(points[-1])
    draw(points, arguments.png)
    print(f"picture: {arguments.png}")


if __name__ == "__main__":
    shorten_idle_spinning()
    main()
