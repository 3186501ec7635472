"""What coming back costs: swapped blocks against computing again, by length; and what sharing a prefix saves.

    python -m benchmarks.swap [--lengths 16,64,256,1024,4096] [--layers 28] [--threads 2] [--rounds 3]

The model has Qwen3-0.6B's shape and made-up bfloat16 weights. Part 1: for each length the worker computes
that many tokens, as after a preemption by recompute, and moves their blocks to a file and back, as after one
by swap; rounds interleave the two, and the best of each counts. Beside them stands what the engine would
decide with the costs that it measures at start. Prints the table and draws both curves. Part 2: 16 requests
share 512 tokens and have 32 of their own, 1 token out, with prefix caching off and on; and 16 different
prompts of 544 tokens, four times what the pool holds, are asked twice, without a host tier and with one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.growth import BLOCK_SIZE, MODELS
from benchmarks.svg import Panel, picture
from pagemill import LLM, EngineArgs, SamplingParams, native
from pagemill.engine.resolve import resolve
from pagemill.env import shorten_idle_spinning
from pagemill.host_tier_plan import MoveCosts
from pagemill.messages import (
    BlockMoves,
    NewSequence,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from pagemill.worker.worker import Worker

_CHUNK = 2048  # tokens of a step
_KV_BYTES = 2 * 2 * 8 * 128  # a token and layer, bfloat16


@dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds for one length, and what the engine would do."""

    length: int
    recompute_ms: float
    out_ms: float
    in_ms: float
    chosen: str

    @property
    def swap_ms(self) -> float:
        """Return out and in together."""
        return self.out_ms + self.in_ms


def arguments_of(folder: str, layers: int, threads: int, tokens: int) -> dict[str, object]:
    """Write a model without weights; return the arguments of an engine with room for `tokens`."""
    Path(folder, "config.json").write_text(
        json.dumps(MODELS["qwen3-0.6b"] | {"num_hidden_layers": layers})
    )
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "num_threads": threads,
        "max_num_batched_tokens": _CHUNK,
        "kv_cache_memory_bytes": tokens * layers * _KV_BYTES,
        "swap_dir": folder,
    }


def recompute_ms(worker: Worker, length: int) -> float:
    """Return the milliseconds of computing `length` tokens in chunks."""
    blocks = tuple(range(-(-length // BLOCK_SIZE)))
    new = (NewSequence(0, "0", (7,) * length, length, 0, SamplingSpec(temperature=0.0)),)
    began = time.perf_counter()
    for start in range(0, length, _CHUNK):
        first = start == 0
        count = min(_CHUNK, length - start)
        share = ScheduledSequence(0, start, count, 0, blocks if first else (), 0)
        worker.execute(
            SchedulerOutput(step_id=0, scheduled=(share,), new_sequences=new if first else ())
        )
    took = time.perf_counter() - began
    worker.execute(SchedulerOutput(step_id=0, scheduled=(), removed_seq_ids=(0,)))
    return 1e3 * took


def moves_ms(worker: Worker, moves: BlockMoves) -> float:
    """Return the milliseconds of a step that only moves blocks."""
    began = time.perf_counter()
    result = worker.execute(SchedulerOutput(step_id=0, scheduled=(), block_moves=moves))
    assert result.lost is None
    return 1e3 * (time.perf_counter() - began)


def measure(worker: Worker, costs: MoveCosts, length: int, rounds: int) -> Point:
    """Return the best of `rounds` for one length."""
    blocks = range(-(-length // BLOCK_SIZE))
    out = BlockMoves(swap_out=tuple(SwapOut(block, block) for block in blocks))
    into = BlockMoves(swap_in=tuple(SwapIn(block, block) for block in blocks))
    times = [
        (recompute_ms(worker, length), moves_ms(worker, out), moves_ms(worker, into))
        for _ in range(rounds)
    ]
    computed, written, read = (min(column) for column in zip(*times, strict=True))
    swaps = costs.swap_s(len(blocks), len(blocks)) < costs.recompute_s(0, length)
    return Point(length, computed, written, read, "swap" if swaps else "recompute")


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw both ways over the length."""
    panel = Panel("Coming back after a preemption", "tokens of the sequence", "ms")
    curves = {
        "compute again": {point.length: point.recompute_ms for point in points},
        "swap out and in": {point.length: point.swap_ms for point in points},
        "swap in alone": {point.length: point.in_ms for point in points},
    }
    panel.lines(curves)
    panel.legend(list(curves))
    path.write_text(picture([panel]))


def crossover(arguments: argparse.Namespace) -> None:
    """Run part 1."""
    lengths = [int(word) for word in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        fields = arguments_of(
            folder, arguments.layers, arguments.threads, max(lengths) + BLOCK_SIZE
        )
        worker = Worker(resolve(EngineArgs(**fields, max_model_len=max(lengths))))  # type: ignore[arg-type]
        tier = worker.memory_plan.host_tier
        assert tier is not None, "the tier's file could not be written"
        print("\n".join(tier.lines(BLOCK_SIZE)))
        print("  tokens  compute ms    out ms     in ms  compute / swap  auto would")
        points = []
        for length in lengths:
            point = measure(worker, tier.costs, length, arguments.rounds)
            points.append(point)
            print(
                f"{point.length:8} {point.recompute_ms:11.1f} {point.out_ms:9.2f} {point.in_ms:9.2f} "
                f"{point.recompute_ms / point.swap_ms:15.1f}  {point.chosen}",
                flush=True,
            )
        worker.close()
    if arguments.plot is not None:
        draw(points, arguments.plot)
        print(f"picture: {arguments.plot}")


def shared_prefix(arguments: argparse.Namespace) -> None:
    """Run part 2."""
    stem = [(31 * i) % 30_000 for i in range(512)]
    asked = [[*stem, *((17 * i + n) % 30_000 for i in range(32))] for n in range(1, 17)]
    different = [[(13 * i + n) % 30_000 for i in range(544)] for n in range(40, 56)]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
    for name, fields in (
        ("no prefix caching", {"enable_prefix_caching": False, "swap_space": 0}),
        ("prefix caching", {"swap_space": 0}),
        ("prefix caching, host tier", {}),
    ):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            settled = arguments_of(folder, arguments.layers, arguments.threads, 2048)
            with LLM(**{**settled, "max_model_len": 1024, **fields}) as llm:  # type: ignore[arg-type]
                seconds = []
                for prompts in (asked, different, different):
                    began = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds.append(time.perf_counter() - began)
                found = sum(output.num_cached_tokens or 0 for output in outputs)
        print(
            f"{name:27} shared prefix: {seconds[0]:6.2f} s; different prompts: {seconds[1]:6.2f} s; "
            f"these again: {seconds[2]:6.2f} s, {found} tokens found",
            flush=True,
        )


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="16,64,256,1024,4096")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("1", "2", "both"), default="both")
    parser.add_argument(
        "--dir", help="folder for the tier's file and the model; default: the system's"
    )
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.svg")
    arguments = parser.parse_args()
    print(native.describe())
    if arguments.part != "2":
        crossover(arguments)
    if arguments.part != "1":
        shared_prefix(arguments)


if __name__ == "__main__":
    shorten_idle_spinning()
    main()
