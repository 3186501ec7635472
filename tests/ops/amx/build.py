"""Builds the linear layers' AMX paths for a machine without AMX, and stands in for the extension with them."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = (
    "common/parallel", "linear/linear", "linear/linear_pack", "linear/linear_copy",
    "linear/linear_ref", "linear_int8/linear_int8", "linear_int8/linear_int8_ref", "limits/limits",
    "limits/limits_ref",
)  # fmt: skip
AMX_SOURCES = ("linear/linear_amx", "linear_int8/linear_int8_amx", "limits/limits_amx")
# As CMakeLists.txt has them.
AMX_SETS = (
    "avx2", "fma", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16",
    "amx-tile", "amx-bf16", "amx-int8",
)  # fmt: skip
ABSENT = ("AVX2", "AVX2_VNNI", "AVX512", "AVX512_VNNI", "AVX512_BF16")
COMMON = (
    "-std=c++17", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi",
    "-DPAGEMILL_HAVE_AMX=1", *(f"-DPAGEMILL_HAVE_{name}=0" for name in ABSENT),
)  # fmt: skip
# Fixture parameters that name the two kinds of libraries.
SOFTWARE = {"amx_emulated": "emulated", "amx_trapped": "trapped"}
_INT, _SIZE, _SHORT = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS = {
    "pack_linear": [_SIZE, _INT, _INT, _INT, _SIZE, _INT, _INT, _SHORT],
    "linear_rows": [_SIZE, _INT, _SIZE, _INT, _INT, _SIZE, _SHORT],
    "linear": [_SIZE, _INT, _INT, _SIZE, _INT, _INT, _SHORT, _SIZE, _SIZE, _INT, _SIZE, _INT,
               _SHORT, _SHORT],
    "pack_int8": [_SIZE, _INT, _INT, _INT, _SIZE, _SIZE, _SIZE, _SIZE, _INT, _INT],
    "linear_int8_rows": [_SIZE, _INT, _SIZE, _SIZE, _INT, _INT, _SIZE, _SHORT],
    "linear_int8": [_SIZE, _INT, _INT, _SHORT, _SHORT, ctypes.c_float, _SHORT, _SIZE, _SIZE, _SIZE,
                    _INT, _INT, _SIZE, _SIZE, _INT, _SIZE, _INT, _SHORT, _SHORT],
}  # fmt: skip


class AmxLibrary:
    """The functions of `pagemill._C` that linear layers have, out of a library of its own."""

    def __init__(self, path: Path, *, trapped: bool) -> None:
        self._library = ctypes.CDLL(str(path))
        self.trapped = trapped
        for name, arguments in _ARGUMENTS.items():
            function = self._library[f"amx_{name}"]
            function.argtypes, function.restype = arguments, ctypes.c_char_p
            setattr(self, name, self._guarded(function))
        self._library.amx_peak_flops.restype = ctypes.c_double
        self._library.amx_peak_int8_ops.restype = ctypes.c_double
        self._library.amx_read_memory.restype = ctypes.c_uint64
        self._library.amx_read_pieces.restype = ctypes.c_uint64
        if trapped:
            self._library.amx_count_traps.restype = ctypes.c_uint64

    def set_num_threads(self, count: int) -> None:
        """Set the threads of its parallel regions."""
        self._library.amx_set_num_threads(count)

    def peak_flops(self, rounds: int) -> float:
        """Return the operations done by so many rounds of products in registers."""
        return float(self._library.amx_peak_flops(ctypes.c_int64(rounds)))

    def peak_int8_ops(self, rounds: int) -> float:
        """Return the operations done by so many rounds of products of bytes."""
        return float(self._library.amx_peak_int8_ops(ctypes.c_int64(rounds)))

    def read_memory(self, start: int, size_bytes: int) -> int:
        """Return the sum of the words of some memory."""
        return int(self._library.amx_read_memory(_SIZE(start), _INT(size_bytes)))

    def read_pieces(self, start: int, piece_bytes: int, order: int, count: int) -> int:
        """Return the sum of the words of some pieces, whose numbers [count] int64 lie at `order`."""
        pieces = _SIZE(start), _INT(piece_bytes), _SIZE(order), _INT(count)
        return int(self._library.amx_read_pieces(*pieces))

    def install_traps(self) -> None:
        """Carry out tile instructions in software from now on."""
        self._library.amx_install_traps()

    def remove_traps(self) -> None:
        """Bring the former handler of illegal instructions back."""
        self._library.amx_remove_traps()

    def count_traps(self) -> int:
        """Return how many tile instructions were carried out so far."""
        return int(self._library.amx_count_traps())

    @staticmethod
    def _guarded(function: Any) -> Any:
        def call(*arguments: int) -> None:
            message = function(*arguments)
            if message is not None:
                raise ValueError(message.decode())

        return call


class AmxLibraries:
    """The libraries, each built when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, AmxLibrary] = {}

    def of(self, kind: str) -> AmxLibrary:
        """Return the library of a kind; see `build`."""
        if kind not in self._made:
            self._made[kind] = build(self._folder, kind)
        return self._made[kind]


def build(folder: Path, kind: str) -> AmxLibrary:
    """Return the library: tiles "emulated" in plain C++, or the true instructions "trapped".

    Skips, saying why, where there is no compiler, or where the rest of that file's code cannot run.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the AMX path is not compiled for emulation")
    trapped = kind == "trapped"
    if trapped:
        _need_trappable()
    # `make sanitize` asks for checks in this way.
    flags = [*COMMON, *os.environ.get("CXXFLAGS", "").split(), f"-I{ROOT / 'csrc'}"]
    own = [] if trapped else ["-DPAGEMILL_EMULATED_TILES"]
    sets = [f"-m{name}" for name in AMX_SETS] if trapped else own
    tiles = [folder / f"{kind}_{name.replace('/', '_')}.o" for name in AMX_SOURCES]
    for name, made in zip(AMX_SOURCES, tiles, strict=True):
        _run([compiler, *flags, *sets, "-c", str(ROOT / f"csrc/{name}.cpp"), "-o", str(made)])
    files = [ROOT / f"csrc/{name}.cpp" for name in SOURCES]
    files += [Path(__file__).with_name("library.cpp")]
    if trapped:
        files += [Path(__file__).with_name("traps.cpp")]
    library = folder / f"{kind}.so"
    _run(
        [compiler, *flags, *own, "-shared", "-Wl,-Bsymbolic", *map(str, files + tiles),
         "-o", str(library)]
    )  # fmt: skip
    return AmxLibrary(library, trapped=trapped)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _need_trappable() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("AMX code does not run on this processor, trapped or not")
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    if "amx_tile" in flags:
        pytest.skip("this machine has AMX: its instructions are not trapped, the path runs as amx")
    lacking = [flag for flag in ("avx512bw", "avx512_vnni", "avx512_bf16") if flag not in flags]
    if lacking:
        pytest.skip(f"code for AMX machines also needs {', '.join(lacking)}, which is not here")
