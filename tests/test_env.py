"""The environment: what is read from it, and the defaults that are set for compute libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import env
from tests.fakes.fake_model import save_tiny_llama


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a word about OpenMP's idle threads, restored afterwards."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that the test's own changes are undone too
        monkeypatch.delenv(name)
    return monkeypatch


def test_idle_threads_spin_shortly(bare: pytest.MonkeyPatch) -> None:
    env.shorten_idle_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "ACTIVE")]
)
def test_what_the_user_says_of_idle_threads_stays(
    bare: pytest.MonkeyPatch, name: str, value: str
) -> None:
    bare.setenv(name, value)
    env.shorten_idle_spinning()
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT", "7") == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP comes with torch on Linux")
def test_openmp_gets_to_know_it_before_torch_is_there(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    program = (
        "import sys; from pagemill.engine.resolve import resolve; "
        "from pagemill.engine_args import EngineArgs; resolve(EngineArgs(model=sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '1000'" in run.stderr


def test_every_variable_that_is_read_is_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(env.__file__).read_text()
    read = set(re.findall(r'PREFIX \+ "([A-Z_]+)"', source))
    assert {"CACHE", "CPU_ISA", "LOG_LEVEL"} <= read
    for name in read:
        monkeypatch.setenv(env.PREFIX + name, "x")
    monkeypatch.setenv("PAGEMILL_CPU_ISO", "x")
    assert env.unknown_variables(set()) == ["PAGEMILL_CPU_ISO"]
