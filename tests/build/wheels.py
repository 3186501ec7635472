"""Wheels of this tree, and environments that hold one: called by the tests beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def require_builder() -> None:
    """Skip, by name, where the programs that pip would fetch are not installed."""
    for module in ("scikit_build_core", "nanobind"):
        pytest.importorskip(module, reason=f"{module} is not installed: it is in the extra `dev`")


def build_wheel(source: Path, folder: Path, **variables: str) -> Path:
    """Build a wheel of `source` with this environment's build tools, as pip does; return it."""
    command = [
        sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(folder), f"--config-settings=build-dir={folder / 'cmake'}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a fresh environment that sees this one's libraries; return its Python.

    Editable installs of this environment are not seen: they work by start-up files, which one path
    more does not run.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q"]
    subprocess.run([*command, str(wheel)], check=True, stdout=subprocess.DEVNULL)
    return python


def ask(python: Path, code: str, folder: Path, **variables: str) -> str:
    """Run `code` in another folder than the tree and return what it prints and logs."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PAGEMILL_", "PYTHON"))}
    done = subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env={**keep, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
