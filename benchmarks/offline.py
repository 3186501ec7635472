"""Tokens a second against other engines: same weights, same dtype, same jobs, in turn.

    python -m benchmarks.offline --cases c --rounds 3

Engines live in processes of their own and take turns (A B C, A B C, ...), so that a machine whose speed
drifts favours none. Figures are medians; ratios are of medians, with the spread of the single rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks import models, work
from benchmarks.engines import ENGINES


class EngineProcess:
    """The parent's end of `benchmarks.engines`."""

    def __init__(self, name: str, folder: str, dtype: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.engines", name, folder, dtype, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, case: str, round: int) -> dict[str, float]:
        """Do one case and return the wall seconds and the tokens generated."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case} {round}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(names: list[str], cases: str, rounds: int, folder: str, dtype: str) -> None:
    """Run the engines in turn and print one line a case and engine."""
    threads = os.cpu_count() or 1
    engines = [EngineProcess(name, folder, dtype, threads) for name in names]
    print(f"model {os.path.basename(folder)}, {dtype}, {threads} threads, {rounds} rounds")
    for case in cases:
        jobs = work.make(case, 0)
        for engine in engines:
            engine.run("b" if case == "c" else case, 90)  # warm up
        walls: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for round in range(rounds):
            for engine in engines:
                answer = engine.run(case, round)
                assert answer["num_output"] == sum(job.num_output for job in jobs), engine.name
                walls[engine.name].append(answer["wall_s"])
        _report(case, jobs, walls)
    for engine in engines:
        engine.close()


def _report(case: str, jobs: list[work.Job], walls: dict[str, list[float]]) -> None:
    num_output = sum(job.num_output for job in jobs)
    num_total = num_output + sum(len(job.prompt) for job in jobs)
    own = walls["pagemill"]
    for name, times in walls.items():
        wall = statistics.median(times)
        ratios = sorted(other / mine for other, mine in zip(times, own, strict=True))
        print(
            f"case {case}  {name:24s} {wall:8.2f} s  {num_output / wall:8.1f} output tok/s  "
            f"{num_total / wall:8.1f} total tok/s  pagemill is {wall / statistics.median(own):5.2f}x "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--cases", default="c")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--model", default=None, help="a Hugging Face folder; default: SmolLM2-135M"
    )
    args = parser.parse_args()
    folder = args.model or str(models.smollm2_folder())
    measure(args.engines.split(","), args.cases, args.rounds, folder, args.dtype)


if __name__ == "__main__":
    main()
