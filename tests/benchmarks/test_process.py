"""An engine's process sleeps between turns, answers in its own, and says why it ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import random_models
from benchmarks.engines.base import EngineOptions
from benchmarks.engines.process import (
    EngineFailed,
    EngineProcess,
    command,
    has_package,
    python_of,
)

# Stand-ins that keep the protocol, or break it.
_HEAD = "import os, sys, threading\nos.setpgid(0, 0)\n"
_READY = """print('{"version": "1.2"}', flush=True)\n"""
ECHO = _HEAD + _READY + "for line in sys.stdin: print('{\"wall_s\": %d}' % len(line), flush=True)\n"
SPINNING = (
    _HEAD
    + "def spin():\n    while True: pass\n"
    + "threading.Thread(target=spin, daemon=True).start()\n"
    + _READY
    + "sys.stdin.read()\n"
)
DYING = _HEAD + _READY + "sys.stdin.readline()\nsys.exit('no memory for that')\n"
STILLBORN = "import sys\nsys.exit('no such model')\n"


def started(script: str) -> EngineProcess:
    """Return a stand-in's process."""
    return EngineProcess("stand-in", [sys.executable, "-c", script], threads=1)


def status_of(engine: EngineProcess) -> str:
    """Return the state of an engine's process once the signal on its way has come."""
    process = psutil.Process(engine.pid)
    for _ in range(200):
        if process.status() == psutil.STATUS_STOPPED:
            break
        time.sleep(0.01)
    return str(process.status())


def test_engine_is_stopped_between_its_turns() -> None:
    with started(ECHO) as engine:
        engine.wait_ready()
        assert engine.version == "1.2"
        assert status_of(engine) == psutil.STATUS_STOPPED
        assert engine.run("a", "12") == {"wall_s": len("a 12\n")}
        assert status_of(engine) == psutil.STATUS_STOPPED
        assert engine.run("b", "warm-up") == {"wall_s": len("b warm-up\n")}
        assert engine.resident_bytes() > 1 << 20


def test_engine_that_spins_takes_no_time_from_the_others() -> None:
    with started(SPINNING) as engine:
        engine.wait_ready()
        assert status_of(engine) == psutil.STATUS_STOPPED
        process = psutil.Process(engine.pid)
        before = process.cpu_times()
        time.sleep(0.3)
        assert process.cpu_times() == before
        assert engine.idle_share(0.3) > 0.0


def test_engine_that_dies_in_a_turn_gives_its_last_words() -> None:
    with started(DYING) as engine:
        engine.wait_ready()
        with pytest.raises(EngineFailed, match="stand-in ended with code 1: no memory for that"):
            engine.run("a", "0")
        with pytest.raises(EngineFailed, match="no memory for that"):
            engine.run("a", "1")


def test_engine_that_does_not_load_gives_its_last_words() -> None:
    with started(STILLBORN) as engine, pytest.raises(EngineFailed, match="no such model"):
        engine.wait_ready()


def test_leaving_ends_a_stopped_engine() -> None:
    with started(ECHO) as engine:
        engine.wait_ready()
        pid = engine.pid
    assert not psutil.pid_exists(pid)


def test_stopped_engine_ends_when_its_caller_is_killed() -> None:
    script = (
        "import os, signal, sys\n"
        "from benchmarks.engines.process import EngineProcess\n"
        f"engine = EngineProcess('x', [sys.executable, '-c', {ECHO!r}], 1)\n"
        "engine.wait_ready()\n"
        "print(engine.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False
    )
    pid = int(run.stdout)
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"process {pid} outlived its caller")


def test_pagemill_answers_with_the_figures_of_a_turn(tmp_path: Path) -> None:
    shape = {
        **random_models.SHAPES["qwen3-0.6b"],
        "vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    random_models.write_folder(shape, tmp_path)
    options = EngineOptions(
        str(tmp_path), "bfloat16", threads=1, kv_tokens=8192, kv_bytes=8192 * 128
    )
    arguments = command(sys.executable, "pagemill", options)
    with EngineProcess("pagemill", arguments, threads=1) as engine:
        engine.wait_ready()
        assert set(engine.run("d", "0")) == {"wall_s", "prefill_tok_per_s"}
        assert set(engine.run("a", "warm-up")) == {"wall_s", "ttft_ms", "decode_tok_per_s"}


def test_package_and_environment_are_found_where_they_are(tmp_path: Path) -> None:
    assert python_of(tmp_path, None) == sys.executable
    assert python_of(tmp_path, "vllm") is None
    assert has_package(sys.executable, "torch")
    assert not has_package(sys.executable, "no_such_package")
