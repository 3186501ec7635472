"""Whose fault it is that a file cannot be read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from pagemill.checkpoint.gguf_reader import read_gguf
from pagemill.errors import CheckpointError, OutOfMemoryError


def test_memory_that_the_system_refuses_is_not_the_file_s_fault(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **fields: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfMemoryError, match="The file is not at fault: raise"):
        read_gguf(smollm2_gguf)


def test_a_file_that_may_not_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read .*gone.gguf: No such file"):
        read_gguf(tmp_path / "gone.gguf")
