"""A tiny model folder for the commands that load one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.fake_model import save_tiny_llama

# Small pools and one thread: what is tested is the command, not the machine.
SMALL = ["--kv-cache-memory-bytes", "8MiB", "--num-threads", "1"]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("cli") / "llama", max_position=256))


@pytest.fixture
def small() -> list[str]:
    return list(SMALL)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
