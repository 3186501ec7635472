"""A whole engine on an emulated processor: the answers of the same path on this machine, to the bit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import native
from tests.fakes.fake_model import save_tiny_llama
from tests.native.builds import ROOT, missing
from tests.ops.conftest import needs_extension

ANSWER = """
import sys, torch
from pagemill import LLM, SamplingParams, native
assert native.describe().startswith("native, avx2 "), native.describe()
params = SamplingParams(temperature=0.8, max_tokens=8, logprobs=2)
for dtype, quantization in (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")):
    settings = {"dtype": dtype, "quantization": quantization, "max_model_len": 128}
    with LLM(sys.argv[1], seed=1, kv_cache_memory_bytes=1 << 22, **settings) as llm:
        outputs = llm.generate(["The quick brown fox", "a"], params, use_tqdm=False)
    print([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
"""


def ask(folder: Path, *before: str, **variables: str) -> str:
    """Return what the engine answers, in a process that `before` runs."""
    command = [*before, sys.executable, "-c", ANSWER, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@needs_extension
def test_an_engine_on_an_emulated_haswell_answers_as_its_path_does_here(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the extension is for another machine")
    if lacking := missing("qemu-x86_64"):
        pytest.skip(lacking)
    if "avx2" not in native.required().available_isas().split(", "):
        pytest.skip("this machine has no avx2")
    folder = save_tiny_llama(tmp_path / "model")
    here = ask(folder, PAGEMILL_CPU_ISA="avx2")
    assert ask(folder, "qemu-x86_64", "-cpu", "Haswell") == here
    assert len(here.splitlines()) == 4
