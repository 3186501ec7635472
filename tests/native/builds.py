"""Builds of the native kernels for tests: the driver program, for this machine, for Arm, with sanitizers.

They lie under build/, where `make clean` finds them, and are kept from run to run. Called by the tests
beside it and by `make sanitize`. `make setup` and `make build` make a driver too, with the extension.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "tests"
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_OPTIONS = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
)


def missing(*programs: str) -> str | None:
    """Return what to say when one of the programs is not installed."""
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def cmake() -> str:
    """Return the cmake of this Python's environment, or the system's."""
    beside = Path(sys.executable).with_name("cmake")
    found = str(beside) if beside.exists() else shutil.which("cmake")
    assert found is not None, "cmake comes with the development tools"
    return found


def build(name: str, *options: str) -> Path:
    """Configure with `options` and build; return the folder. The compiler's words are shown if it fails."""
    folder = OUT / name
    for command in (
        [cmake(), "-S", str(ROOT), "-B", str(folder), *options],
        [cmake(), "--build", str(folder), "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def build_driver(name: str, *options: str) -> Path:
    """Build the driver program and return it."""
    folder = build(f"driver-{name}", "-DPAGEMILL_DRIVER=ON", "-DPAGEMILL_EXTENSION=OFF", *options)
    return folder / "pagemill_driver"


def installed_driver() -> Path | None:
    """Return the driver that `make setup` or `make build` left, unless sources have changed since."""
    driver = ROOT / "build" / "driver" / "pagemill_driver"
    sources = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "tests/native/driver").iterdir()]
    if driver.exists() and driver.stat().st_mtime > max(f.stat().st_mtime for f in sources):
        return driver
    return None
