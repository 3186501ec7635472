"""Every benchmark is a command that starts."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from pagemill import native
from pagemill.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted([*BENCHMARKS.glob("*.py"), *(BENCHMARKS / "ops").glob("*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_finds_what_it_imports(file: Path) -> None:
    """Those that begin with peers import them when they run."""
    parts = file.relative_to(BENCHMARKS.parent).with_suffix("").parts
    try:
        importlib.import_module(".".join(parts))
    except ConfigError as error:
        if native.extension() is not None:
            raise
        pytest.skip(f"measures the native kernels: {error}")
