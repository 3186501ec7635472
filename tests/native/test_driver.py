"""The kernels without Python: on every path here, and on other machines by emulation.

The driver checks each operation against float64 and against itself (rows alone, two threads); one path
gives one digest, whatever the machine. An emulator or compiler that is not installed is a skip that
names it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagemill import native
from tests.native.builds import (
    ARM_COMPILER,
    ARM_OPTIONS,
    ROOT,
    build_driver,
    installed_driver,
    missing,
)

X86 = platform.machine() == "x86_64"
# A processor -> the path that its features lead to.
PROCESSORS = {"Haswell": "avx2", "Nehalem": "portable"}


@dataclass(frozen=True)
class Report:
    """What the driver printed: the best path, and each path's digests by operation."""

    best: str
    digests: dict[str, dict[str, str]]


def run_driver(command: list[str], *paths: str) -> Report:
    # Threads that wait must sleep: the machine may be busy, and emulated ones are slow.
    quiet = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [*command, *paths], capture_output=True, text=True, timeout=280, env=quiet
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    digests: dict[str, dict[str, str]] = {}
    for line in lines:
        path, operation, digest = line.split()
        digests.setdefault(path, {})[operation] = digest
    assert first.startswith("best ")
    return Report(first.removeprefix("best "), digests)


@pytest.fixture(scope="session")
def driver() -> Path:
    made = installed_driver()
    if made is not None:
        return made
    lacking = missing("c++")
    if lacking:
        pytest.skip(lacking)
    return build_driver("here")


@pytest.fixture(scope="session")
def here(driver: Path) -> Report:
    return run_driver([str(driver)])


def test_every_path_of_this_machine_passes(here: Report) -> None:
    assert list(here.digests)[0] == here.best
    assert list(here.digests)[-1] == "portable"
    extension = native.extension()
    if extension is not None:
        assert list(here.digests) == extension.available_isas().split(", ")


def test_sums_of_whole_numbers_are_the_same_on_every_path(here: Report) -> None:
    assert len({digests["linear_int8"] for digests in here.digests.values()}) == 1


@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_emulated_processor_takes_its_path_and_gets_the_same_bits(
    processor: str, driver: Path, here: Report
) -> None:
    lacking = missing("qemu-x86_64") or (None if X86 else "the driver is for another machine")
    if lacking:
        pytest.skip(lacking)
    path = PROCESSORS[processor]
    report = run_driver(["qemu-x86_64", "-cpu", processor, str(driver)], path)
    assert report.best == path
    if path in here.digests:
        assert report.digests[path] == here.digests[path]


def test_emulated_arm_passes_on_the_portable_path() -> None:
    lacking = missing("qemu-aarch64", ARM_COMPILER)
    if lacking:
        pytest.skip(lacking)
    built = build_driver("arm", *ARM_OPTIONS)
    report = run_driver(["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(built)])
    assert report.best == "portable" and list(report.digests) == ["portable"]


LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("pagemill._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.active_isa())
try:
    module.force_isa("amx")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_built_extension_takes_its_path_on_an_emulated_processor(processor: str) -> None:
    extension = native.extension()
    lacking = missing("qemu-x86_64") or (None if X86 else "the extension is for another machine")
    if extension is None:
        lacking = "pagemill._C is not built: run `make build`"
    if lacking:
        pytest.skip(lacking)
    command = ["qemu-x86_64", "-cpu", processor, sys.executable, "-c", LOAD, extension.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    chosen, error = done.stdout.splitlines()
    assert chosen == PROCESSORS[processor]
    assert "'amx'" in error and "available: " + chosen in error


def test_every_operation_of_the_extension_is_driven() -> None:
    bindings = (ROOT / "csrc" / "bindings.cpp").read_text()
    driver = "".join(f.read_text() for f in (ROOT / "tests/native/driver").glob("*.cpp"))
    # What tells or sets something and computes nothing has its tests elsewhere.
    settings = {"active_isa", "num_threads", "pin_threads"}
    named = set(re.findall(r'm\.def\("(\w+)"', bindings)) - settings
    assert "linear" in named
    assert {name for name in named if f"pagemill::{name}(" not in driver} == set()
