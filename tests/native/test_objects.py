"""What the compiled kernels are made of: no torch, and no code of one path that another could get."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.native.builds import ROOT, missing

# The suffix of a file that is compiled with flags of its own.
OWN_FLAGS = re.compile(r"_(avx2|avx2_vnni|avx512|avx512_vnni|avx512_bf16|amx)\.cpp\.o$")


def test_no_torch_header_is_included() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(sources) > 50
    for path in sources:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def built_objects() -> list[Path]:
    """Return the objects of paths with flags of their own that `make setup` or `make build` left."""
    found = (ROOT / "build").glob("*/CMakeFiles/kernels.dir/csrc/*/*.o")
    return sorted(path for path in found if OWN_FLAGS.search(path.name))


def test_the_linker_can_give_code_of_one_path_to_no_other() -> None:
    """A weak symbol (an inline function, a template) is kept once, whichever file's flags it has."""
    objects = built_objects()
    lacking = missing("nm") or (
        None if objects else "the kernels were not built here: `make build`"
    )
    if lacking:
        pytest.skip(lacking)
    done = subprocess.run(["nm", "-A", *objects], capture_output=True, text=True, check=True)
    assert " T " in done.stdout
    # A pointer to the handler of exceptions is the same in every file, and no code.
    pointers = re.compile(r" V DW\.ref\.")
    weak = [line for line in done.stdout.splitlines() if re.search(r" [WVu] ", line)]
    assert [line for line in weak if not pointers.search(line)] == []
