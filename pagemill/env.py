"""The only reader of os.environ.

`PAGEMILL_<FIELD>` gives the default of the engine argument or server flag of that name; the few
variables that are not arguments are the functions here. Called by the argument parser, the logger, the
checkpoint cache, `engine.resolve` and the CPU device.
"""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "PAGEMILL_"
# The variables that are no arguments, without the prefix.
_OWN = ("CACHE", "CPU_ISA", "LOG_LEVEL")


def argument_defaults(names: set[str]) -> dict[str, str]:
    """Return the raw text of each PAGEMILL_<NAME> variable whose name is in `names`."""
    found = {}
    for name in names:
        value = os.environ.get(PREFIX + name.upper())
        if value is not None:
            found[name] = value
    return found


def unknown_variables(known: set[str]) -> list[str]:
    """Return the PAGEMILL_ variables that are neither an argument in `known` nor read here, sorted."""
    read = {PREFIX + name.upper() for name in known} | {PREFIX + name for name in _OWN}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in read)


def cache_dir() -> Path:
    """Return the folder for pulled models: PAGEMILL_CACHE, else $XDG_CACHE_HOME/pagemill."""
    own = os.environ.get(PREFIX + "CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "pagemill"


def log_level() -> str:
    """Return the level of pagemill's logger: PAGEMILL_LOG_LEVEL, else INFO."""
    return os.environ.get(PREFIX + "LOG_LEVEL", "INFO").upper()


def cpu_isa() -> str | None:
    """Return the instruction set that PAGEMILL_CPU_ISA forces on the native kernels, or None."""
    return os.environ.get(PREFIX + "CPU_ISA")


def omp_num_threads() -> str | None:
    """Return OMP_NUM_THREADS as the user set it, or None."""
    return os.environ.get("OMP_NUM_THREADS")


def omp_stack_size() -> str | None:
    """Return the stack of OpenMP's threads as the user set it, or None."""
    return os.environ.get("OMP_STACKSIZE") or os.environ.get("GOMP_STACKSIZE")


def omp_places_set() -> bool:
    """Return whether the user placed OpenMP's threads."""
    names = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    return any(os.environ.get(name) for name in names)


def limit_onednn_caches(num_entries: int) -> None:
    """Bound the compiled matrix products that oneDNN, and torch's layer over it, keep.

    Both read these variables at their first product. A value that the user set stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(num_entries))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(num_entries))


def shorten_idle_spinning() -> None:
    """Let OpenMP's idle threads sleep after microseconds; called before torch is imported.

    They spin for milliseconds otherwise, which costs nothing on an idle machine. On a busy one the thread
    that is waited for does not run while its mates spin, and steps take ten times as long. 1000 rounds
    are GNU OpenMP's own choice where threads outnumber cores. What the user set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
