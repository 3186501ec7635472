"""Every example runs, with a real model, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What must stand in the output of each example; an example without a line here fails the test below.
EXPECTED = {
    "offline.py": ["'The capital of France is' -> "],
    "chat.py": ["Paris"],
    "samples_and_logprobs.py": ["sample 0, seed 7", "sample 2, seed 7", "rank 1"],
    "logits_processor.py": ["\n"],
    "engine_steps.py": ["second: ", "third: "],
    "async_stream.py": ["a '", "b '"],
}
NEEDS_SERVER = {"openai_client.py"}  # run in tests/server, against the real `pagemill serve`


def test_every_example_is_tested() -> None:
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert found == set(EXPECTED) | NEEDS_SERVER


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_prints_what_it_promises(name: str, smollm2_gguf: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), str(smollm2_gguf)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    for text in EXPECTED[name]:
        assert text in run.stdout
    assert "first: " not in run.stdout  # the aborted request of engine_steps.py
    if name == "logits_processor.py":
        assert not any(map(str.isdigit, run.stdout))
