"""What the benchmarks of linear layers share: shapes, the command line, clocks, and the streaming limit."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagemill import native
from pagemill.device.host_memory import lazy_zeros

# out, in of: qkv, out, gate and up, down, head (cut to 16384 rows, which is as good as all)
SHAPES = {
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (16384, 576)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (16384, 1024)],
    "Llama-3.2-1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (16384, 2048)],
}
COPIES_BYTES = 200_000_000  # of weights that are used in turn, so that none comes from a cache
_READ_BYTES = 400_000_000

Shape = tuple[int, int]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how."""

    threads: int
    seconds: float  # a figure
    rows: tuple[int, ...]
    shapes: dict[str, tuple[Shape, ...]]  # by model, without repetitions

    @property
    def clock(self) -> Clock:
        """Return CPU time with one thread: what other processes take does not count; else the wall's."""
        return time.thread_time if self.threads == 1 else time.perf_counter


def make_parser(doc: str, *, rows: str) -> argparse.ArgumentParser:
    """Return the arguments that all share; `rows` is a default."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each figure, about")
    parser.add_argument("--rows", default=rows)
    parser.add_argument("--models", default=",".join(SHAPES))
    return parser


def settle(arguments: argparse.Namespace) -> Setting:
    """Bring the kernels into the setting that was asked for, and return it."""
    module = native.required()
    if arguments.isa:
        try:
            module.force_isa(arguments.isa)
        except ValueError as error:
            raise SystemExit(f"--isa: {error}") from error
    torch.set_num_threads(arguments.threads)
    module.set_num_threads(arguments.threads)
    models = arguments.models.split(",")
    unknown = sorted(set(models) - set(SHAPES))
    if unknown:
        raise SystemExit(
            f"--models: {', '.join(unknown)} is not known; there are {', '.join(SHAPES)}"
        )
    return Setting(
        threads=arguments.threads,
        seconds=arguments.seconds,
        rows=tuple(int(word) for word in arguments.rows.split(",")),
        shapes={name: tuple(dict.fromkeys(SHAPES[name])) for name in models},
    )


def shortest(call: Callable[[int], object], setting: Setting) -> float:
    """Return the least time of a call; it gets the number of the call."""
    return in_turn([call], setting)[0]


def in_turn(calls: list[Callable[[int], object]], setting: Setting) -> list[float]:
    """Return the least time of each call; they take turns, and get the number of the round."""
    clock, times = setting.clock, [list[float]() for _ in calls]
    end = time.perf_counter() + setting.seconds * len(calls)
    while len(times[0]) < 4 or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call(len(taken))
            taken.append(clock() - start)
    return [min(taken[1:]) for taken in times]


def streaming_bandwidth(setting: Setting) -> float:
    """Return the bytes a second that this machine reads from memory, laid out as weights are."""
    memory = lazy_zeros((_READ_BYTES // 8,), torch.int64).fill_(1)
    module = native.required()
    longer = Setting(setting.threads, 4 * setting.seconds, setting.rows, setting.shapes)
    return _READ_BYTES / shortest(
        lambda _: module.read_memory(memory.data_ptr(), _READ_BYTES), longer
    )


def heading(what: str, setting: Setting, bandwidth: float, peak: str = "") -> str:
    """Return the first line of a report."""
    return (
        f"{what}, {native.required().active_isa()}, {setting.threads} threads: streaming "
        f"{bandwidth / 1e9:.1f} GB/s{peak}"
    )
