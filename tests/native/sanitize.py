"""`make sanitize`: the native kernels under the address, undefined-behaviour and thread sanitizers.

The first two run the tests of the operations in Python with an instrumented extension, and the driver. The
third needs clang and its own OpenMP runtime (GNU's hides its waiting from the sanitizer, which then sees
races where there are none), and runs the driver alone. What is not installed is an error that names it.

    python -m tests.native.sanitize [--only driver|operations|threads] [tests/ops/test_norm.py ...]

The whole takes long; each part can be run by itself, and so can each file of the operations' tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.native.builds import ROOT, build, build_driver, missing

ADDRESS = "-DPAGEMILL_SANITIZE=address,undefined"
THREAD = ("-DPAGEMILL_SANITIZE=thread", "-DCMAKE_CXX_COMPILER=clang++")
TESTS = ("tests/ops", "tests/attention/test_cpu.py", "tests/attention/test_backends.py")
# Skips are named; checks in every load take their time.
PYTEST = ("-m", "pytest", "-p", "tests.native.from_folder", "-rs", "-o", "timeout=1800")
OPTIONS = {
    "OMP_WAIT_POLICY": "passive",
    # Python and torch keep much until the end.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    # Archer tells the sanitizer how OpenMP's threads wait for each other.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
}


def library(name: str) -> str:
    """Return the path of one of the compiler's run-time libraries."""
    command = ["c++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(command: list[str], **variables: str) -> None:
    """Show and run a command with the sanitizers' options; end with its status if it fails."""
    print("+", *(f"{k}={v}" for k, v in variables.items()), *command, flush=True)
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **OPTIONS, **variables})
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        sys.exit(done.returncode)


def build_checked() -> Path:
    """Build extension and driver with address and undefined-behaviour sanitizers."""
    return build(
        "address", ADDRESS, "-DPAGEMILL_DRIVER=ON", f"-DPython_EXECUTABLE={sys.executable}"
    )


def check_driver() -> None:
    """Run the driver with those sanitizers."""
    run([str(build_checked() / "pagemill_driver")], ASAN_OPTIONS="detect_leaks=1")


def check_operations(tests: Sequence[str]) -> None:
    """Run the operations' tests, or some files of them, with those sanitizers."""
    run(
        [sys.executable, *PYTEST, *tests],
        EXTENSION_FOLDER=str(build_checked()),
        LD_PRELOAD=f"{library('libasan.so')} {library('libubsan.so')}",
    )


def check_threads() -> None:
    """Run the driver with the thread sanitizer."""
    lacking = missing("clang++")
    if lacking:
        sys.exit(f"the thread sanitizer needs clang and libomp; {lacking}")
    run([str(build_driver("thread", *THREAD))])


def main() -> None:
    """Run the parts that are asked for, all without arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("driver", "operations", "threads"))
    parser.add_argument("tests", nargs="*", default=TESTS, help="of the operations")
    arguments = parser.parse_args()
    if arguments.only in (None, "driver"):
        check_driver()
    if arguments.only in (None, "operations"):
        check_operations(arguments.tests)
    if arguments.only in (None, "threads"):
        check_threads()


if __name__ == "__main__":
    main()
