"""`make sanitize`: the native kernels under the address, undefined-behaviour and thread sanitizers.

The first two run the driver, and the tests of the operations in Python with an instrumented extension. The
third needs clang and its own OpenMP runtime (GNU's hides its waiting from the sanitizer, which then sees
races where there are none), and runs the driver alone. What is not installed is an error that names it.

    python -m tests.native.sanitize [--only driver|operations|threads] [--jobs N] [tests/ops/test_norm.py ...]

Every file of tests is a process of its own, some at a time, whose words go into a log under build/tests;
one that finds something does not keep the others from running. The last line says what was clean and
what was not, and the status is 0 only if all was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.native.builds import OUT, ROOT, build, build_driver, missing

ADDRESS = "-DPAGEMILL_SANITIZE=address,undefined"
THREAD = ("-DPAGEMILL_SANITIZE=thread", "-DCMAKE_CXX_COMPILER=clang++")
# The longest first: what starts last should not be waited for.
TESTS = (
    "tests/ops/test_linear.py",
    "tests/ops/test_linear_int8.py",
    "tests/attention/test_cpu.py",
    "tests/attention/test_backends.py",
    "tests/attention/test_int8_cache.py",
    "tests/ops",
)
# Skips are named; checks in every load take their time. A sanitizer that finds something ends the process:
# its words go into the log, where pytest would keep them in memory, behind the name of the test.
PYTEST = ("-m", "pytest", "-p", "tests.native.instrumented", "-rs", "-vv", "-o", "timeout=1800")
PYTEST += ("--capture=sys", "-p", "no:faulthandler")
# Reads and writes one number past the end of a tensor.
OVERRUN = """
import tests.native.instrumented
import torch
from pagemill import native

numbers = torch.zeros(1000)
native.required().soft_cap(numbers.data_ptr(), 1001, 1.0)
"""
OPTIONS = {
    "OMP_WAIT_POLICY": "passive",
    # Python and torch keep much until the end.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Archer tells the sanitizer how OpenMP's threads wait for each other.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
}
# Most processes at a time: each holds torch, and what a sanitizer keeps of memory that was freed.
MOST_JOBS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """One process under a sanitizer: its name, its command and the variables it needs beside OPTIONS."""

    name: str
    command: Sequence[str]
    variables: dict[str, str]
    # What the last line holds if anything was tested; a file of which all is skipped tells nothing.
    proof: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended: `said` is its last line, or what is wrong."""

    name: str
    clean: bool
    said: str
    seconds: float


def library(name: str) -> str:
    """Return the path of one of the compiler's run-time libraries."""
    command = ["c++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of a process under a sanitizer."""
    return {**os.environ, **OPTIONS, **variables}


def run(check: Check) -> Outcome:
    """Run a check with the sanitizers' options and return how it ended; its words go into its log."""
    log = OUT / "sanitize" / f"{check.name.replace('/', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as out:
        done = subprocess.run(
            check.command,
            cwd=ROOT,
            env=environment(check.variables),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    seconds = time.monotonic() - start
    written = log.read_text(errors="replace")
    last = written.strip().rpartition("\n")[2].strip("= ")
    clean = done.returncode == 0 and check.proof in last
    said = last if done.returncode == 0 else f"ended with status {done.returncode}"
    print(f"{check.name}: {'clean' if clean else 'NOT CLEAN'}, {said}, {seconds:.0f} s", flush=True)
    if not clean:
        print(f"{written[-6000:]}\n(the end of {log.relative_to(ROOT)})", flush=True)
    return Outcome(check.name, clean, said, seconds)


def build_checked() -> Path:
    """Build extension and driver with address and undefined-behaviour sanitizers."""
    return build(
        "address", ADDRESS, "-DPAGEMILL_DRIVER=ON", f"-DPython_EXECUTABLE={sys.executable}"
    )


def driver_checks() -> list[Check]:
    """Return the driver with those sanitizers: the only one that looks for lost memory too."""
    program = str(build_checked() / "pagemill_driver")
    return [Check("driver", [program], {"ASAN_OPTIONS": "detect_leaks=1"}, "portable tape")]


def files_of(tests: Iterable[str]) -> list[str]:
    """Return the files of tests: those of a folder, in order, and what is no folder as it is."""
    files: list[str] = []
    for name in tests:
        folder = ROOT / name
        found = sorted(folder.glob("test_*.py")) if folder.is_dir() else [folder]
        files += [str(path.relative_to(ROOT)) for path in found]
    return list(dict.fromkeys(files))


def require_findings(variables: dict[str, str]) -> None:
    """Make sure that an overrun in an operation is found: where it is not, nothing can be called clean."""
    command = [sys.executable, "-c", OVERRUN]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(variables), capture_output=True, text=True
    )
    if done.returncode == 0 or "heap-buffer-overflow" not in done.stderr:
        sys.exit(f"the sanitizer does not see an overrun in soft_cap: {done.stderr[-2000:]}")


def operations_checks(tests: Iterable[str]) -> list[Check]:
    """Return the operations' tests, or some files of them, with those sanitizers."""
    variables = {
        "EXTENSION_FOLDER": str(build_checked()),
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        # The AMX paths are compiled by the tests themselves, over tiles in software.
        "CXXFLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=all -g",
    }
    require_findings(variables)
    return [
        Check(name, [sys.executable, *PYTEST, name], variables, " passed")
        for name in files_of(tests)
    ]


def threads_checks() -> list[Check]:
    """Return the driver with the thread sanitizer."""
    return [Check("threads", [str(build_driver("thread", *THREAD))], {}, "portable tape")]


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the one line that says what was clean and what was not."""
    parts = {
        words: [outcome.name for outcome in outcomes if outcome.clean is clean]
        for clean, words in ((False, "NOT CLEAN"), (True, "clean"))
    }
    told = [f"{words}: {', '.join(names)}" for words, names in parts.items() if names]
    return f"sanitize: {'; '.join(told)}; {len(outcomes)} checks, {seconds / 60:.0f} min"


def main() -> None:
    """Run the parts that are asked for, all without arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("driver", "operations", "threads"))
    parser.add_argument("--jobs", type=int, default=min(len(os.sched_getaffinity(0)), MOST_JOBS))
    parser.add_argument("tests", nargs="*", default=TESTS, help="of the operations")
    arguments = parser.parse_args()
    lacking = missing("clang++")
    if lacking and arguments.only in (None, "threads"):
        sys.exit(f"the thread sanitizer needs clang and libomp; {lacking}")
    start = time.monotonic()
    checks: list[Check] = []
    if arguments.only in (None, "driver"):
        checks += driver_checks()
    if arguments.only in (None, "operations"):
        checks += operations_checks(arguments.tests)
    if arguments.only in (None, "threads"):
        checks += threads_checks()
    print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(run, checks))
    print(summary(outcomes, time.monotonic() - start))
    sys.exit(0 if all(outcome.clean for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
