"""`make sanitize`: the native kernels under the address, undefined-behaviour and thread sanitizers.

The first two run the tests of the operations in Python with an instrumented extension, and the driver. The
third needs clang and its own OpenMP runtime (GNU's hides its waiting from the sanitizer, which then sees
races where there are none), and runs the driver alone. What is not installed is an error that names it.
"""

from __future__ import annotations

import os
import subprocess
import sys

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
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **OPTIONS, **variables})
    if done.returncode:
        sys.exit(done.returncode)


def check_memory(arguments: list[str]) -> None:
    """Run the driver and the operations' tests with address and undefined-behaviour sanitizers."""
    folder = build(
        "address", ADDRESS, "-DPAGEMILL_DRIVER=ON", f"-DPython_EXECUTABLE={sys.executable}"
    )
    run([str(folder / "pagemill_driver")], ASAN_OPTIONS="detect_leaks=1")
    run(
        [sys.executable, *PYTEST, *(arguments or TESTS)],
        EXTENSION_FOLDER=str(folder),
        LD_PRELOAD=f"{library('libasan.so')} {library('libubsan.so')}",
    )


def check_threads() -> None:
    """Run the driver with the thread sanitizer."""
    lacking = missing("clang++")
    if lacking:
        sys.exit(f"the thread sanitizer needs clang and libomp; {lacking}")
    run([str(build_driver("thread", *THREAD))])


if __name__ == "__main__":
    check_memory(sys.argv[1:])
    check_threads()
