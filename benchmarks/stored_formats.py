"""Writes a .gguf model in the types that llama.cpp makes, for `benchmarks.quality --stored`.

    VENV/bin/python benchmarks/stored_formats.py MODEL.gguf FOLDER [Q4_0 Q4_K_M ...]

Runs in the virtual environment of llama.cpp (benchmarks/README.md), whose quantizer does the work; nothing of
pagemill is used. The other stored formats are written by `tests/data/quantized/make.py`. A mix such as
Q4_K_M takes another type where a matrix does not divide into blocks of 256, as llama.cpp's own does.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")


def write(source: Path, target: Path, kind: str) -> None:
    """Write one file. Raises SystemExit where llama.cpp refuses."""
    import llama_cpp  # of that environment; nothing else here has it

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True  # from float values again
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(settings)
    )
    if failed:
        raise SystemExit(f"llama.cpp could not write {target}")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*", default=_TYPES)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind in arguments.types:
        write(arguments.model, arguments.folder / f"{kind}.gguf", kind)


if __name__ == "__main__":
    main()
