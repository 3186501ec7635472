"""Which kernels are in use: what is said about it, and what PAGEMILL_CPU_ISA does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pagemill import native
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from tests.fakes.fake_model import save_tiny_llama
from tests.ops.conftest import needs_extension

ROOT = Path(__file__).parents[1]


def run(*arguments: str, isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PAGEMILL_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )


@needs_extension
def test_the_variable_forces_a_path() -> None:
    done = run("pagemill.native", isa="portable")
    assert done.stdout.startswith("kernels: native, portable (available: "), done.stderr
    report = run("pagemill", "collect-env", isa="portable")
    assert "native, portable (available: " in report.stdout and report.returncode == 0


@needs_extension
def test_a_path_that_is_lacking_is_refused_with_those_there_are(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    available = native.required().available_isas()
    for arguments in (("pagemill.native",), ("pagemill", "plan", str(folder))):
        done = run(*arguments, isa="sve9")
        assert done.returncode == 1
        assert "PAGEMILL_CPU_ISA" in done.stderr and "'sve9'" in done.stderr
        assert f"available: {available}" in done.stderr
        assert "Traceback" not in done.stderr
    for flags in ((), ("--json",)):
        report = run("pagemill", "collect-env", *flags, isa="sve9")
        assert "cannot be used: PAGEMILL_CPU_ISA" in report.stdout and report.returncode == 1


def test_a_path_is_refused_where_no_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PAGEMILL_CPU_ISA", "avx2")
    with pytest.raises(
        ConfigError, match="PAGEMILL_CPU_ISA is 'avx2', but no native kernels are built"
    ):
        native.extension.__wrapped__()


def installed_with(kernels: bytes, to: Path) -> Path:
    """Return a folder with a pagemill whose kernels' file holds these bytes."""
    (suffix, *_) = importlib.machinery.EXTENSION_SUFFIXES
    shutil.copytree(ROOT / "pagemill", to / "pagemill", ignore=shutil.ignore_patterns("_C.*.so"))
    (to / "pagemill" / f"_C{suffix}").write_bytes(kernels)
    return to


def run_installed(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of that pagemill, without `site`: an editable install finds its own kernels first."""
    packages = os.pathsep.join(dict.fromkeys([str(place), *site.getsitepackages()]))
    return subprocess.run(
        [sys.executable, "-S", "-m", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("kernels", [b"", b"no library" * 1000])
def test_kernels_that_cannot_be_loaded_are_an_error_that_says_what_to_do(
    kernels: bytes, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    place = installed_with(kernels, tmp_path / "installed")
    for command, status in (
        (["plan", str(folder)], 1),
        (["collect-env"], 1),
    ):
        done = run_installed(place, "pagemill", *command)
        said = done.stdout + done.stderr
        assert "the native kernels cannot be loaded: " in said and "make build" in said
        assert done.returncode == status and "Traceback" not in said


@needs_extension
@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5])
def test_kernels_whose_file_ends_too_early_are_refused(share: float, tmp_path: Path) -> None:
    whole = Path(str(native.required().__file__)).read_bytes()
    place = installed_with(whole[: int(share * len(whole))], tmp_path)
    done = run_installed(place, "pagemill.native")
    assert done.returncode == 1, done.returncode  # and not a signal
    assert "ends too early, as after an interrupted build. " in done.stderr
    assert "make build" in done.stderr


@needs_extension
def test_kernels_of_other_sources_are_refused_by_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = types.ModuleType("pagemill._C")
    older.__file__ = "somewhere/_C.so"
    for name in dir(native.required()):
        if name != "linear_rows" and not name.startswith("__"):
            setattr(older, name, getattr(native.required(), name))
    spec = importlib.machinery.ModuleSpec("pagemill._C", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib, "import_module", lambda name: older)
    words = "in somewhere/_C.so were built from other sources .* lack linear_rows. .*make build"
    with pytest.raises(ConfigError, match=words):
        native.extension.__wrapped__()


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="mapped libraries are read from /proc")
def test_torch_and_the_kernels_share_one_openmp() -> None:
    code = (
        "import torch; from pagemill import native; native.extension().set_num_threads(2);"
        "torch.ones(1000, 1000).matmul(torch.ones(1000, 1000));"
        "print(open('/proc/self/maps').read())"
    )
    command = [sys.executable, "-c", code]
    maps = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    files = {line.split()[-1] for line in maps.splitlines() if "omp" in line.split("/")[-1]}
    assert len({file for file in files if "libgomp" in file or "libomp" in file}) == 1, files


@needs_extension
def test_a_wrong_path_leaves_the_path_as_it_was() -> None:
    before = native.required().active_isa()
    with pytest.raises(ConfigError):
        native.use_isa("sve9")
    assert native.required().active_isa() == before


def test_the_start_says_path_and_threads(tmp_path: Path) -> None:
    notes = resolve(EngineArgs(str(save_tiny_llama(tmp_path / "tiny")))).notes
    [kernels] = [line for line in notes if line.startswith("kernels = ")]
    assert kernels.endswith(native.describe())
    assert [line for line in notes if line.startswith("num_threads = ")]


def test_the_start_says_where_the_number_of_threads_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notes = resolve(EngineArgs(str(save_tiny_llama(tmp_path / "tiny")))).notes
    assert [line for line in notes if line.startswith("num_threads = 1: OMP_NUM_THREADS; ")]


def test_without_the_extension_the_start_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    notes = resolve(EngineArgs(str(save_tiny_llama(tmp_path / "tiny")))).notes
    assert f"kernels = torch: {native.describe()}" in notes
    assert "no native kernels are built" in native.describe() and "slower" in native.describe()
    with pytest.raises(ConfigError, match="no native kernels are built.*make build"):
        native.required()


def test_an_install_says_a_compiler_and_a_source_folder_says_where_else_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "pagemill" / "native.py"))
    assert native.describe() == native.LOST
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "csrc").mkdir()
    assert f"in the source folder {tmp_path}" in native.describe()
    assert "Run from another folder" in native.describe() and "make build" in native.describe()
