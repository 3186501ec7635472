"""A prefill step, by part: where the time to the first token goes, beside what registers allow.

    python -m benchmarks.prefill [--rows 128,2048] [--rounds 9] [--format bf16|int8|int4] [--threads 2]

One engine with made-up weights in Qwen3-0.6B's shape is given one prompt after the other, of lengths in
turn, each of other ids, and asked for one token. Every native call of those steps is timed from outside.
A line is one part: its calls, milliseconds (the median of the rounds, and the least), its share of the
whole step, its operations a second, and their share of the peak: products of bfloat16 pairs (of bytes, for
`--format int8`) from registers alone, measured between the rounds. "between calls" is the model's Python
and torch, "around the model" scheduling, sampling and outputs. The last line says how many cores were
busy, how many pages the step touched for the first time, and how long it would take with all linear
layers and attention at the peak. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks import random_models
from pagemill import native
from pagemill.env import shorten_idle_spinning
from pagemill.messages import StepStats

if TYPE_CHECKING:
    from pagemill import LLMEngine

_LINEAR = ("linear", "linear_int8", "qlinear")
_SMALL = {
    "rms_norm": "norms", "rotate_heads": "norm and rotation of heads", "rope_angles": "angles",
    "embedding": "embedding", "linear_rows": "embedding", "linear_int8_rows": "embedding",
    "qlinear_rows": "embedding",
}  # fmt: skip
_SAMPLING = "best_rows"
_QUANTIZATION = {"bf16": None, "int8": "int8", "int4": "int4"}
_BFLOAT16 = 1  # the extension's number of the dtype
_PEAK_ROUNDS = 3_000_000
_WARM_UP_ROUNDS = 2
_MAX_LEN = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder of Llama's kind."""

    layers: int
    matrices: dict[
        str, tuple[int, int]
    ]  # of one layer, in the order of their calls: outputs, inputs
    attention_width: int  # query heads times their size

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read config.json's fields."""
        hidden, size = config["hidden_size"], config["intermediate_size"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        matrices = {
            "qkv": (queries + 2 * keys, hidden), "out": (hidden, queries),
            "gate and up": (2 * size, hidden), "down": (hidden, size),
        }  # fmt: skip
        return cls(config["num_hidden_layers"], matrices, queries)

    def linear_flops(self, name: str, rows: int) -> float:
        """Return the products and sums of one matrix, all layers.

        After the last layer's attention only the row that is sampled from goes on.
        """
        n, k = self.matrices[name]
        last = rows if name == "qkv" else 1
        return 2.0 * n * k * (rows * (self.layers - 1) + last)

    def attention_flops(self, rows: int) -> float:
        """Return those of a whole prompt's attention, keys that are seen counted alone."""
        return 2.0 * rows * (rows + 1) * self.attention_width * self.layers


@dataclass(slots=True)
class Calls:
    """The native calls of one step."""

    shape: Shape
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_linear: int = 0

    def note(self, function: str, seconds: float) -> None:
        """Count one call."""
        part = self._part(function)
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.counts[part] = self.counts.get(part, 0) + 1

    def _part(self, function: str) -> str:
        if function not in _LINEAR:
            return _SMALL.get(function, function)
        names = list(self.shape.matrices)
        index, self.num_linear = self.num_linear, self.num_linear + 1
        return names[index % len(names)] if index < self.shape.layers * len(names) else "head"


class Stopwatch:
    """Stands in for the extension's operations and times their calls; a StatLogger besides."""

    def __init__(self, shape: Shape, module: ModuleType) -> None:
        """Put itself in place of the operations: for the rest of the process."""
        self._shape = shape
        self.calls = Calls(shape)
        self.model_s = 0.0
        for name in (*_LINEAR, *_SMALL, "attention", _SAMPLING):
            if name in vars(module):
                setattr(module, name, self._timed(name, getattr(module, name)))

    def start(self) -> None:
        """Forget what was counted."""
        self.calls, self.model_s = Calls(self._shape), 0.0

    def record(self, stats: StepStats) -> None:
        """Add a step's time in the model, the head included."""
        self.model_s += stats.timings_s.get("model", 0.0)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.calls.note(name, time.perf_counter() - start)
            return result

        return timed


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt's step."""

    whole_s: float
    model_s: float
    calls: Calls
    num_faults: int
    processor_s: float  # of all threads

    def parts(self) -> dict[str, float]:
        """Return seconds by part; they add up to the whole."""
        sampling = self.calls.seconds.get(_SAMPLING, 0.0)
        parts = {name: s for name, s in self.calls.seconds.items() if name != _SAMPLING}
        parts["between calls"] = self.model_s - sum(parts.values())
        parts["sampling"] = sampling
        parts["around the model"] = self.whole_s - self.model_s - sampling
        return parts


@dataclass(frozen=True, slots=True)
class Peaks:
    """Operations a second from registers alone: the linear layers' kind, and attention's."""

    linear: float
    attention: float


def run_prompt(engine: LLMEngine, watch: Stopwatch, rows: int, number: int) -> Step:
    """Give the engine one prompt and take its first token."""
    from pagemill import SamplingParams

    rng = random.Random(number)
    ids = [rng.randrange(300, 30_000) for _ in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    before = resource.getrusage(resource.RUSAGE_SELF)
    watch.start()
    start = time.perf_counter()
    engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        engine.step()
    whole = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Step(whole, watch.model_s, watch.calls, after.ru_minflt - before.ru_minflt, processor)


def measure_peaks(module: ModuleType, weights: str) -> Peaks:
    """Return operations a second from registers, once."""
    start = time.perf_counter()
    bfloat16 = float(module.peak_flops(_BFLOAT16, _PEAK_ROUNDS)) / (time.perf_counter() - start)
    if weights != "int8":
        return Peaks(bfloat16, bfloat16)
    start = time.perf_counter()
    return Peaks(
        float(module.peak_int8_ops(_PEAK_ROUNDS)) / (time.perf_counter() - start), bfloat16
    )


def report(shape: Shape, rows: int, steps: Sequence[Step], peaks: Sequence[Peaks]) -> str:
    """Return a Markdown table of the steps of one length."""
    linear_peak = statistics.median(peak.linear for peak in peaks)
    attention_peak = statistics.median(peak.attention for peak in peaks)
    whole = statistics.median(step.whole_s for step in steps)
    parts = [step.parts() for step in steps]
    flops = {name: shape.linear_flops(name, rows) for name in shape.matrices}
    linear_flops = sum(flops.values())
    flops["attention"] = shape.attention_flops(rows)
    bounds = {name: done / linear_peak for name, done in flops.items()}
    bounds["attention"] = flops["attention"] / attention_peak
    lines = [
        f"{rows} tokens: {rows / whole:.0f} tokens/s; peak {linear_peak / 1e9:.0f} GFLOP/s",
        "",
        "| part | calls | ms | least | of the step | GFLOP/s | of the peak |",
        "|---|---|---|---|---|---|---|",
    ]

    def add(name: str, seconds: Sequence[float], done: float = 0.0, bound: float = 0.0) -> None:
        middle, count = statistics.median(seconds), steps[0].calls.counts.get(name, "-")
        line = f"| {name} | {count} | {1e3 * middle:.2f} | {1e3 * min(seconds):.2f} "
        line += f"| {middle / whole:.1%} | "
        line += f"{done / middle / 1e9:.0f} | {bound / middle:.0%} |" if done else "- | - |"
        lines.append(line)

    for name in parts[0]:
        seconds = [part[name] for part in parts]
        add(name, seconds, flops.get(name, 0.0), bounds.get(name, 0.0))
    linear = [sum(part[name] for name in shape.matrices) for part in parts]
    add("linear layers together", linear, linear_flops, linear_flops / linear_peak)
    whole_bound = sum(bounds.values())
    add("the whole step", [step.whole_s for step in steps], sum(flops.values()), whole_bound)
    faults = statistics.median(step.num_faults for step in steps)
    busy = statistics.median(step.processor_s / step.whole_s for step in steps)
    lines += ["", f"{busy:.2f} cores busy; {faults:.0f} pages touched for the first time; "]
    lines[-1] += f"linear layers and attention at the peak: {1e3 * whole_bound:.0f} ms"
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="128,2048")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", default="bf16", choices=_QUANTIZATION)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="qwen3-0.6b", choices=random_models.SHAPES)
    arguments = parser.parse_args()
    # Before torch, which the engine imports, starts its threads.
    shorten_idle_spinning()
    from pagemill import EngineArgs, LLMEngine

    lengths = [int(word) for word in arguments.rows.split(",")]
    shape = Shape.of(random_models.SHAPES[arguments.model])
    module = native.required()
    watch = Stopwatch(shape, module)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(random_models.model_folder(arguments.model)), dtype="bfloat16",
            quantization=_QUANTIZATION[arguments.format], num_threads=arguments.threads,
            max_model_len=_MAX_LEN, max_num_batched_tokens=_MAX_LEN, enforce_eager=True,
            kv_cache_memory_bytes=1 << 30,
        ),
        stat_loggers=[watch],
    )  # fmt: skip
    steps: dict[int, list[Step]] = {rows: [] for rows in lengths}
    peaks = []
    for round in range(_WARM_UP_ROUNDS + arguments.rounds):
        for rows in lengths:
            step = run_prompt(engine, watch, rows, round * 10_000 + rows)
            if round >= _WARM_UP_ROUNDS:
                steps[rows].append(step)
                peaks.append(measure_peaks(module, arguments.format))
    print(
        f"{arguments.model}, {arguments.format}, {arguments.threads} threads, {native.describe()}"
    )
    for rows in lengths:
        print("\n" + report(shape, rows, steps[rows], peaks), flush=True)


if __name__ == "__main__":
    main()
