"""`pagemill collect-env`: what a bug report needs: versions, CPU, memory, threads, models.

Ends with 1 where the native kernels cannot be used, such as a path that PAGEMILL_CPU_ISA asks for and the
machine lacks: no engine would start. That none are built is no failure; the report says how to get them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path

from pagemill import env, native
from pagemill.device.host import num_processors
from pagemill.errors import ConfigError
from pagemill.version import __version__

# Dependencies, and what the extra "transformers" brings.
PACKAGES = (
    "torch", "numpy", "tokenizers", "huggingface-hub", "jinja2", "starlette", "uvicorn",
    "prometheus-client", "tqdm", "pyyaml", "transformers", "sentencepiece",
)  # fmt: skip
# Instruction sets that decide how fast matrices are multiplied.
CPU_FLAGS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni", "amx_tile",
    "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 where the kernels cannot be used."""
    report, usable = collect()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name:<{width}}  {value}")
    return 0 if usable else 1


def collect() -> tuple[dict[str, str], bool]:
    """Return the report, line by line (what -> its value), and whether an engine could use the kernels."""
    report = {
        "pagemill": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "executable": sys.executable,
    }
    report |= {name: _version(name) for name in PACKAGES}
    report |= _torch_build()
    report |= _cpu()
    report["memory"] = _memory()
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    report["C++ compiler"] = compiler or "none found"
    report["kernels"], usable = _kernels()
    report["cache folder"] = str(env.cache_dir())
    report["pulled models"] = _pulled()
    return report, usable


def _kernels() -> tuple[str, bool]:
    try:
        return native.describe(), True
    except (ConfigError, ImportError) as error:
        return f"cannot be used: {error}", False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_build() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {"torch build": f"cannot be imported: {error}"}
    return {
        "torch build": f"CUDA {torch.version.cuda or 'none'}, {torch.backends.cpu.get_cpu_capability()}",
        "torch threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS {env.omp_num_threads() or 'unset'})",
        "CUDA devices": str(torch.cuda.device_count()),
    }


def _cpu() -> dict[str, str]:
    model, flags = _proc_cpuinfo()
    return {
        "CPU": model or platform.processor() or platform.machine(),
        "CPU features": " ".join(f for f in CPU_FLAGS if f in flags) or "unknown",
        "CPU cores": _cores(),
    }


def _proc_cpuinfo() -> tuple[str, set[str]]:
    """Return the model name and the flags of the first core; nothing where there is no /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", set()
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip().lower(), value.strip())
    flags = values.get("flags") or values.get("features") or ""
    return values.get("model name", ""), set(flags.split())


def _cores() -> str:
    try:
        return f"{num_processors()} usable of {os.cpu_count()}"
    except ConfigError as error:
        return f"{os.cpu_count()}; {error}"


def _memory() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    text = f"{pages * size / 2**30:.1f} GiB in the machine"
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return text
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            text += f", {int(line.split()[1]) / 2**20:.1f} GiB available"
    return text


def _pulled() -> str:
    from pagemill.checkpoint.pull import pulled_models

    return ", ".join(pulled_models()) or "none"
