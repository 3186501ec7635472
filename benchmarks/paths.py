"""The instruction sets of this machine in turn: each beside the best one, and beside its own peak.

    python -m benchmarks.paths [--paths avx512_bf16,avx512,avx2] [--model qwen3-0.6b] [--threads 2]
        [--rounds 7] [--rows 512] [--seconds 0.2]

One engine with made-up bfloat16 weights decodes one request on every path, round by round: tokens a second
after the first token, as medians (lowest-highest), and as a share of the best path's. Decoding is bound
by memory, so that no path should lose much. Then the linear layers of the same model are called with many
rows, call by call in turn: operations a second over all matrices of a layer, and their share of what the
path's own multiplication does from registers alone (fused products and sums of float32 where the path has
no bfloat16 ones). The least of many calls counts there. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Sequence

import torch

from benchmarks import random_models, work
from benchmarks.engines.base import EngineOptions
from benchmarks.engines.pagemill import Pagemill
from benchmarks.ops.setting import SHAPES, Setting, in_turn, streaming_bandwidth
from pagemill import native
from pagemill.device.host_memory import lazy_zeros
from pagemill.env import shorten_idle_spinning
from pagemill.ops import cpu as ops

# Those that multiply bfloat16 in ways of their own.
_PATHS = ("amx", "avx512_bf16", "avx512", "avx2")
_SHAPES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-1b": "Llama-3.2-1B"}
_NUM_PROMPT, _NUM_OUTPUT = 32, 49
_WARM_UP_OUTPUT = 24  # more than the steps after which they are replayed
_BFLOAT16 = 1  # the extension's number of the dtype
_FLOP_ROUNDS = 100_000


def decode_rates(
    model: str, paths: Sequence[str], threads: int, rounds: int
) -> dict[str, list[float]]:
    """Return each path's decoded tokens a second, round by round."""
    folder = random_models.model_folder(model)
    tokens = 4 * (_NUM_PROMPT + _NUM_OUTPUT)
    kv_bytes = tokens * random_models.sizes(folder).kv_bytes_per_token
    options = EngineOptions(str(folder), "bfloat16", threads, tokens, kv_bytes, tokens // 2)
    engine = Pagemill(options)
    rng = random.Random(0)
    rates: dict[str, list[float]] = {path: [] for path in paths}
    for round in range(rounds + 1):
        for path in paths:
            native.use_isa(path)
            num_output = _NUM_OUTPUT if round else _WARM_UP_OUTPUT
            # Other ids each time: what another path computed must not come out of a cache.
            prompt = [rng.randrange(300, 30_000) for _ in range(_NUM_PROMPT)]
            outcome = engine.run([work.Job(prompt, num_output)])
            assert outcome.ttft_s is not None
            if round:
                rates[path].append((num_output - 1) / (outcome.wall_s - outcome.ttft_s))
    return rates


def peaks(paths: Sequence[str], setting: Setting) -> list[float]:
    """Return each path's operations a second from registers alone."""
    module = native.required()

    def run(path: str) -> float:
        native.use_isa(path)
        return float(module.peak_flops(_BFLOAT16, _FLOP_ROUNDS))

    operations = [run(path) for path in paths]
    times = in_turn([lambda _, path=path: run(path) for path in paths], setting)  # type: ignore[misc]
    return [done / taken for done, taken in zip(operations, times, strict=True)]


def linear_rates(model: str, paths: Sequence[str], rows: int, setting: Setting) -> list[float]:
    """Return each path's operations a second over the matrices of one layer, with `rows` rows."""
    taken, operations = [0.0] * len(paths), 0
    for n, k in SHAPES[_SHAPES[model]][:-1]:  # the last is the head
        packed = lazy_zeros(ops.packed_shape(n, k, torch.bfloat16), torch.bfloat16)
        ops.pack_linear((torch.rand(n, k) - 0.5).bfloat16(), packed)
        x = (torch.rand(rows, k) - 0.5).bfloat16()

        def run(path: str, x: torch.Tensor = x, packed: torch.Tensor = packed, n: int = n) -> None:
            native.use_isa(path)
            ops.linear(x, packed, n)

        times = in_turn([lambda _, path=path: run(path) for path in paths], setting)  # type: ignore[misc]
        taken = [sum(pair) for pair in zip(taken, times, strict=True)]
        operations += 2 * rows * n * k
    return [operations / seconds for seconds in taken]


def main() -> None:
    """Measure and print a Markdown table."""
    available = native.required().available_isas().split(", ")
    own = [path for path in _PATHS if path in available]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", default=",".join(own), help=f"of {', '.join(available)}")
    parser.add_argument("--model", default="qwen3-0.6b", choices=_SHAPES)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each figure, about")
    arguments = parser.parse_args()
    paths = arguments.paths.split(",")
    decoded = decode_rates(arguments.model, paths, arguments.threads, arguments.rounds)
    torch.set_num_threads(arguments.threads)
    native.required().set_num_threads(arguments.threads)
    setting = Setting(arguments.threads, arguments.seconds, (arguments.rows,), {})
    with torch.inference_mode():
        limits = peaks(paths, setting)
        reached = linear_rates(arguments.model, paths, arguments.rows, setting)
        native.use_isa(paths[0])
        bandwidth = streaming_bandwidth(setting)
    medians = {path: statistics.median(rates) for path, rates in decoded.items()}
    best = max(medians.values())
    weight_bytes = random_models.sizes(random_models.model_folder(arguments.model)).weight_bytes
    print(
        f"{arguments.model}, bfloat16, {arguments.threads} threads, {arguments.rounds} rounds: streaming "
        f"{bandwidth / 1e9:.1f} GB/s, at most {bandwidth / weight_bytes:.1f} tokens/s\n"
    )
    print(
        f"| path | decode tokens/s | of the best | linear layers, {arguments.rows} rows, GFLOP/s "
        "| own peak | share |"
    )
    print("|---|---|---|---|---|---|")
    for path, rate, peak in zip(paths, reached, limits, strict=True):
        low, high = min(decoded[path]), max(decoded[path])
        print(
            f"| {path} | {medians[path]:.1f} ({low:.1f}-{high:.1f}) | {medians[path] / best:.1%} "
            f"| {rate / 1e9:.0f} | {peak / 1e9:.0f} | {rate / peak:.1%} |"
        )


if __name__ == "__main__":
    shorten_idle_spinning()
    main()
