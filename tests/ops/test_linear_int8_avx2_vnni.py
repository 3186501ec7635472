"""The kernels for processors with AVX-VNNI, run on those that have the instruction in AVX-512 only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pagemill import native

ROOT = Path(__file__).parents[2]


def test_its_sums_are_the_portable_ones(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    extension = native.extension()
    if extension is None or "avx512_vnni" not in extension.available_isas():
        pytest.skip("this processor has no avx512_vnni")
    # `make sanitize` asks for checks in this way.
    wanted = os.environ.get("CXXFLAGS", "").split()
    common = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", *wanted, f"-I{ROOT / 'csrc'}"]
    folder, objects = ROOT / "csrc" / "linear_int8", []
    for source, flags in (
        (
            folder / "linear_int8_avx2_vnni.cpp",
            ["-mavx2", "-mfma", "-mavx512f", "-mavx512vl", "-mavx512vnni"],
        ),
        (folder / "linear_int8_ref.cpp", []),
        (Path(__file__).parent / "avx2_vnni_driver.cpp", []),
    ):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        subprocess.run([*common, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    program = str(tmp_path / "driver")
    subprocess.run([*common, *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "60 blocks agree" in done.stdout, done.stdout
