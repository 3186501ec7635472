"""Installing: the wheel works from anywhere, and without a compiler it is pure Python and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pagemill import native
from tests.build.wheels import ROOT, ask, build_wheel, install, require_builder
from tests.fakes.fake_model import save_tiny_llama

# Torch comes first in every program of ours; what is printed is the start's lines and one answer.
START = """
from pagemill import LLM, SamplingParams
from pagemill.cli import main
with LLM("tiny", max_model_len=64, kv_cache_memory_bytes=1 << 20) as llm:
    [output] = llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4
import pagemill
print("from", pagemill.__file__)
main(["collect-env"])
"""


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def run_engine(wheel: Path, folder: Path) -> str:
    """Install a wheel, start an engine from another folder, and return what was said."""
    python = install(wheel, folder / "env")
    save_tiny_llama(folder / "work" / "tiny")
    said = ask(python, START, folder / "work")
    assert f"from {folder / 'env'}" in said
    return said


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_builder()
    return build_wheel(ROOT, tmp_path_factory.mktemp("pure"), CXX="/nonexistent/c++")


def test_without_a_compiler_the_wheel_is_pure_python(pure: Path) -> None:
    assert pure.name.endswith("-none-any.whl")
    assert not [name for name in names(pure) if name.endswith((".so", ".dylib"))]


def test_a_pure_install_says_what_is_lost_at_start_and_when_asked(
    pure: Path, tmp_path: Path
) -> None:
    said = run_engine(pure, tmp_path)
    assert f"kernels = torch: {native.LOST}" in said
    assert said.count(native.LOST) == 2  # at the start, and in collect-env's report


def test_the_makefile_asks_the_install_what_it_has(pure: Path, tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "$(BIN)/python -m pagemill.native" in makefile
    python = install(pure, tmp_path / "env")
    command = [python, "-m", "pagemill.native"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"kernels: {native.LOST}\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_a_wheel_has_the_kernels_and_works_from_another_folder(
    compiler: str, tmp_path: Path
) -> None:
    require_builder()
    if shutil.which(compiler) is None:
        pytest.skip(f"not installed: {compiler}")
    wheel = build_wheel(ROOT, tmp_path, CXX=compiler)
    assert len([name for name in names(wheel) if name.startswith("pagemill/_C.cpython")]) == 1
    assert not [name for name in names(wheel) if name.startswith(("csrc", "tests"))]
    said = run_engine(wheel, tmp_path)
    assert "kernels = native: " in said and native.LOST not in said


@pytest.mark.slow
def test_the_source_distribution_builds_without_the_tree(tmp_path: Path) -> None:
    require_builder()
    code = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    [archive] = tmp_path.glob("*.tar.gz")
    (tmp_path / "tree").mkdir()
    subprocess.run(["tar", "xf", str(archive), "-C", str(tmp_path / "tree")], check=True)
    [tree] = (tmp_path / "tree").iterdir()
    assert not [*tree.rglob("*.so"), *tree.glob("build")]
    (tmp_path / "wheel").mkdir()
    wheel = build_wheel(tree, tmp_path / "wheel")
    assert [name for name in names(wheel) if name.startswith("pagemill/_C.cpython")]
