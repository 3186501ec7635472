"""The native extension: whether it is there, which instruction set it uses, what is lost without it.

`pagemill._C` is built when pagemill is installed, where there is a C++ compiler; a source tree gets it
by `make build`. Without it everything runs on plain PyTorch operations. Called by `device`, `ops`, the
engine's notes at start, `collect-env` and the Makefile (`python -m pagemill.native`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import struct
import sys
from pathlib import Path
from types import ModuleType

from pagemill import env
from pagemill.errors import ConfigError, is_refusal

_COST = (
    "computing with plain PyTorch operations, which is slower, and logprobs agree to rounding rather than "
    "to the bit whatever the batch"
)
LOST = (
    f"no native kernels are built: {_COST}. To get them, install a C++ compiler "
    "(g++ or clang++) and install pagemill again; in a source tree, make build"
)
_AGAIN = "Install pagemill again; in a source tree, make build"


@functools.cache
def extension() -> ModuleType | None:
    """Return pagemill._C, set to the path that PAGEMILL_CPU_ISA asks for, or None when it is absent.

    Raises ConfigError for a path this machine cannot run, for any where no kernels are built, and for kernels
    that cannot be loaded or are not those of these sources. Import torch first: the extension then shares its
    OpenMP threads.
    """
    wanted = env.cpu_isa()
    if importlib.util.find_spec("pagemill._C") is None:
        if wanted:
            raise ConfigError(
                f"PAGEMILL_CPU_ISA is {wanted!r}, but no native kernels are built: unset it, or install a "
                "C++ compiler (g++ or clang++) and install pagemill again; in a source tree, make build"
            )
        return None
    module = _loaded()
    if wanted:
        use_isa(wanted, module)
    return module


def _loaded() -> ModuleType:
    """Return the module; ConfigError where its file cannot be loaded, or is older than the Python files.

    Memory that the system refuses meanwhile is no fault of the file: that ImportError is left as it is.
    """
    path = _path()
    if path is not None and _is_cut(path):
        raise ConfigError(
            f"the native kernels cannot be loaded: {path} ends too early, as after an interrupted build. "
            f"{_AGAIN}, or delete the file to compute without them"
        )
    try:
        module = importlib.import_module("pagemill._C")
    except ImportError as error:
        if is_refusal(error):
            raise
        raise ConfigError(
            f"the native kernels cannot be loaded: {error}. {_AGAIN}, or delete the file to compute without them"
        ) from error
    missing = [name for name in _declared() if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"the native kernels in {module.__file__} were built from other sources than the Python files beside "
            f"them: they lack {', '.join(missing[:3])}. {_AGAIN}"
        )
    return module


def _path() -> Path | None:
    spec = importlib.util.find_spec("pagemill._C")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _is_cut(path: Path) -> bool:
    """Return whether an ELF file is shorter than its segments: loading that ends the process with SIGBUS.

    The layout is the System V ABI's, chapters 4 and 5. Other kinds of files are the loader's to judge.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return False
        (at,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(at)
        table = file.read(size * count)
    if count and size < 56 or len(table) < size * count:
        return True
    ends = (sum(struct.unpack_from("<Q16xQ", table, size * i + 8)) for i in range(count))
    return max(ends, default=0) > path.stat().st_size


def _declared() -> list[str]:
    """Return the names that pagemill._C must have, by its stub; [] where stubs are not installed."""
    stub = Path(__file__).with_name("_C.pyi")
    text = stub.read_text(encoding="utf-8") if stub.is_file() else ""
    return re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)


def use_isa(name: str, module: ModuleType | None = None) -> None:
    """Run the kernels of one instruction set from now on; ConfigError lists the available ones."""
    module = module or required()
    try:
        module.force_isa(name)
    except ValueError as error:
        raise ConfigError(f"PAGEMILL_CPU_ISA: {error}") from error


def required() -> ModuleType:
    """Return the extension; ConfigError says how to get it where there is none."""
    module = extension()
    if module is None:
        raise ConfigError(_lost())
    return module


def describe() -> str:
    """Return one line on the kernels in use, for logs and `collect-env`."""
    module = extension()
    if module is None:
        return _lost()
    return f"native, {module.active_isa()} (available: {module.available_isas()})"


def _lost() -> str:
    """Return why there are no kernels: a source folder hides an installed pagemill from Python, or none are built."""
    root = Path(__file__).resolve().parents[1]
    if not ((root / "pyproject.toml").is_file() and (root / "csrc").is_dir()):
        return LOST
    return (
        f"no native kernels are built in the source folder {root}, whose pagemill Python takes here before an "
        f"installed one: {_COST}. Run from another folder to use what is installed, or build them here: make build"
    )


def main() -> int:
    """Print the line; return the exit code."""
    try:
        print(f"kernels: {describe()}")  # noqa: T201
    except (ConfigError, ImportError) as error:
        print(f"kernels: cannot be used: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
