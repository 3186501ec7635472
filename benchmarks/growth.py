"""How a decode step's time grows with sequences and context, beside what explains it.

    python -m benchmarks.growth [--model qwen3-0.6b] [--layers 28] [--threads 2]
        [--sequences 1,4,16,64] [--contexts 128,2048,8192]

The model has the shape of a real one and made-up bfloat16 weights. A step of n sequences at one context
is run by the worker itself: their tokens count as computed, and the cache is filled beforehand, its
blocks in random order. Each time stands beside bounds, whose terms are measured right before the step
is:

    weights     bytes of weights by the bandwidth of streaming through memory
    kv          bytes of keys and values by the bandwidth of reading pieces of one head and block in
                random order, as a paged cache has them
    linear      operations of the linear layers by the peak from registers
    attention   operations of attention by the same

`sum` is all four one after the other; `least` is what remains if, inside the linear layers and inside
attention, reading and computing overlapped wholly: the larger of weights and linear, and the larger of
kv and attention. A step should lie between them, or little above: its ratio to the sum is printed. A
leap between neighbours that the bounds do not make would be a cliff. Prints the table and draws it.

Qwen3-0.6B's whole cache takes 112 KiB a token: what does not fit in memory is named and left out. With
`--layers 4` everything fits in 24 GiB; the shares of attention and linear layers stay as they are, that
of the head grows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_models import SHAPES
from benchmarks.svg import Panel, picture
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
_MEMORY_BYTES = 400_000_000  # far more than any cache holds
_FLOP_ROUNDS = 300_000
_TRIES = 7
_BFLOAT16 = 1  # the extension's number of the dtype
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 16384, "rope_theta": 100_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {**SHAPES, "smollm2-135m": _SMOLLM2}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured with the threads that the model uses."""

    stream_bytes_per_s: float
    pieces_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step and the bounds of its parts, in milliseconds."""

    sequences: int
    context: int
    step_ms: float
    weights_ms: float
    kv_ms: float
    linear_ms: float
    attention_ms: float

    @property
    def sum_ms(self) -> float:
        """Return the bounds one after the other."""
        return self.weights_ms + self.kv_ms + self.linear_ms + self.attention_ms

    @property
    def least_ms(self) -> float:
        """Return the bounds with reading and computing at once."""
        return max(self.weights_ms, self.linear_ms) + max(self.kv_ms, self.attention_ms)


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, and what its parts ask for."""

    config: dict[str, Any]
    layers: int

    @property
    def weights(self) -> int:
        """Return the numbers of the linear layers and the head, all read by every step."""
        c = self.config
        hidden, head = c["hidden_size"], c["head_dim"]
        queries, keys = head * c["num_attention_heads"], head * c["num_key_value_heads"]
        layer = hidden * (2 * queries + 2 * keys + 3 * c["intermediate_size"])
        return int(self.layers * layer + hidden * c["vocab_size"])

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token's keys and values, all layers."""
        return int(self.layers * 4 * self.config["num_key_value_heads"] * self.config["head_dim"])

    @property
    def key_flops(self) -> int:
        """Return the operations that a query takes for one key that it sees, all layers."""
        return int(self.layers * 4 * self.config["num_attention_heads"] * self.config["head_dim"])

    @property
    def piece_bytes(self) -> int:
        """Return the bytes of one head's keys, or values, in one block."""
        return int(2 * BLOCK_SIZE * self.config["head_dim"])


class LimitsMeter:
    """Measures the limits; holds the memory that is read."""

    def __init__(self, threads: int, piece_bytes: int) -> None:
        native.required().set_num_threads(threads)
        self._memory = lazy_zeros((_MEMORY_BYTES // 8,), torch.int64).fill_(1)
        self._piece_bytes = piece_bytes
        generator = torch.Generator().manual_seed(0)
        self._order = torch.randperm(_MEMORY_BYTES // piece_bytes, generator=generator)

    def measure(self) -> Limits:
        """Return the best of a few tries, about half a second."""
        module, address = native.required(), self._memory.data_ptr()
        order, count = self._order.data_ptr(), len(self._order)
        calls: tuple[Callable[[], object], ...] = (
            lambda: module.read_memory(address, _MEMORY_BYTES),
            lambda: module.read_pieces(address, self._piece_bytes, order, count),
            lambda: module.peak_flops(_BFLOAT16, _FLOP_ROUNDS),
        )
        times = [float("inf")] * len(calls)
        for _ in range(_TRIES):
            for i, call in enumerate(calls):
                start = time.perf_counter()
                call()
                times[i] = min(times[i], time.perf_counter() - start)
        flops = module.peak_flops(_BFLOAT16, 0) + module.peak_flops(_BFLOAT16, _FLOP_ROUNDS)
        pieces = count * self._piece_bytes
        return Limits(_MEMORY_BYTES / times[0], pieces / times[1], flops / times[2])


def make_worker(model: Model, threads: int, tokens: int, context: int, sequences: int) -> Worker:
    """Return a worker with made-up weights whose cache holds `tokens` tokens and is full of numbers."""
    with tempfile.TemporaryDirectory() as folder:
        config = model.config | {
            "architectures": [_ARCHITECTURES[model.config["model_type"]]],
            "num_hidden_layers": model.layers,
            "hidden_act": "silu",
        }
        Path(folder, "config.json").write_text(json.dumps(config))
        worker = Worker(
            resolve(
                EngineArgs(
                    model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                    block_size=BLOCK_SIZE, num_threads=threads, max_num_seqs=sequences,
                    max_model_len=context, max_num_batched_tokens=max(context, 2048),
                    kv_cache_memory_bytes=tokens * model.kv_bytes,
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


def make_point(model: Model, limits: Limits, sequences: int, context: int, step_ms: float) -> Point:
    """Return the step with its bounds."""
    weights, keys = model.weights, sequences * context
    return Point(
        sequences, context, step_ms,
        1e3 * 2 * weights / limits.stream_bytes_per_s,
        1e3 * model.kv_bytes * keys / limits.pieces_bytes_per_s,
        1e3 * 2 * weights * sequences / limits.flops_per_s,
        1e3 * model.key_flops * keys / limits.flops_per_s,
    )  # fmt: skip


def print_point(point: Point) -> None:
    """Print one line of the table."""
    print(
        f"| {point.sequences} | {point.context} | {point.step_ms:.2f} | {point.weights_ms:.2f} | "
        f"{point.kv_ms:.2f} | {point.linear_ms:.2f} | {point.attention_ms:.2f} | "
        f"{point.least_ms:.2f} | {point.sum_ms:.2f} | {point.step_ms / point.sum_ms:.2f} |",
        flush=True,
    )


def draw(points: Sequence[Point]) -> str:
    """Return a picture: a panel a context, measured times and both bounds over the sequences."""
    panels = []
    for context in sorted({point.context for point in points}):
        mine = [point for point in points if point.context == context]
        lines = {
            "measured": {p.sequences: p.step_ms for p in mine},
            "bounds, one after the other": {p.sequences: p.sum_ms for p in mine},
            "bounds, overlapped": {p.sequences: p.least_ms for p in mine},
        }
        panel = Panel(f"{context} tokens each", "sequences", "ms a decode step")
        panel.lines(lines)
        panel.legend(list(lines))
        panels.append(panel)
    return picture(panels)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=None, help="default: the model's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", default="1,4,16,64")
    parser.add_argument("--contexts", default="128,2048,8192")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cache-gib", type=float, default=12.0, help="most memory of the cache")
    parser.add_argument("--picture", type=Path, default=None, metavar="FILE.svg")
    return parser.parse_args()


def main() -> None:
    """Measure the limits and a step by turns, and draw."""
    arguments = _parse()
    config = MODELS[arguments.model]
    model = Model(config, arguments.layers or config["num_hidden_layers"])
    sequences = [int(word) for word in arguments.sequences.split(",")]
    contexts = [int(word) for word in arguments.contexts.split(",")]
    room = NUM_WARM_UP + arguments.steps + BLOCK_SIZE
    most = int(arguments.cache_gib * 2**30) // model.kv_bytes
    cases = [(n, context) for context in contexts for n in sequences]
    fitting = [case for case in cases if case[0] * (case[1] + room) <= most]
    for n, context in cases:
        if (n, context) not in fitting:
            print(f"left out: {n} sequences of {context} tokens need more than --cache-gib")
    meter = LimitsMeter(arguments.threads, model.piece_bytes)
    tokens = max(n * -(-(context + room) // BLOCK_SIZE) * BLOCK_SIZE for n, context in fitting)
    worker = make_worker(model, arguments.threads, tokens, max(contexts) + room, max(sequences))
    title = f"{arguments.model}, {model.layers} layers, {arguments.threads} threads"
    print(f"{title}; {native.describe()}\n")
    print(
        "| sequences | context | step ms | weights | kv | linear | attention | least | sum | / sum |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    points, seen = [], []
    for n, context in fitting:
        seen.append(meter.measure())
        step_ms = run_steps(worker, n, context, arguments.steps)
        points.append(make_point(model, seen[-1], n, context, step_ms))
        print_point(points[-1])
    print(
        f"\nLimits: streaming {_spread([one.stream_bytes_per_s for one in seen])} GB/s, pieces of "
        f"{model.piece_bytes} bytes {_spread([one.pieces_bytes_per_s for one in seen])} GB/s, "
        f"products {_spread([one.flops_per_s for one in seen])} GFLOP/s"
    )
    if arguments.picture is not None:
        arguments.picture.write_text(draw(points))
        print(f"picture: {arguments.picture}")


def _spread(values: Sequence[float]) -> str:
    return f"{min(values) / 1e9:.1f}-{max(values) / 1e9:.1f}"


if __name__ == "__main__":
    shorten_idle_spinning()
    main()
