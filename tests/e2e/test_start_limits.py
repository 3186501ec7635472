"""A start that memory does not suffice for is refused in words, wherever memory ends; nothing dies or hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.fake_model import save_tiny_llama

# 36 MB of float32, in matrices that are read from the file when they are packed.
SIZES = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
ROOMS = ["0", "20", "40", "60", "80", "100", "120", "140", "160", "200", "4000"]


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_wherever_memory_ends_the_start_is_refused_in_words(
    quantization: str, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "model", **SIZES)
    program = Path(__file__).parent / "start_limits.py"
    command = [sys.executable, str(program), str(folder), "2", quantization, *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(ends) == len(ROOMS) and ends[-1] == "answered", done.stdout
    assert "answered" not in ends[:2]
    for end in ends:
        assert end == "answered" or end.startswith("refused: "), done.stdout + done.stderr
        assert "ulimit -v" in end or not end.startswith("refused: "), done.stdout
