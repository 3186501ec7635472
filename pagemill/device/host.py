"""Memory and cores that this process may use: machine, cgroup limits, CPU affinity; memory that is refused.

Standard library only. Called by the devices and by `pagemill collect-env`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from pagemill.device import topology
from pagemill.errors import ConfigError, OutOfMemoryError, PagemillError, is_refusal

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest multiple of the page size in an int64.
_NO_LIMIT = 1 << 60
# OMP_STACKSIZE: a number and a unit, KiB without one (OpenMP 5.2, section 21.2.2).
_STACK = re.compile(r"\s*(\d+)\s*([BKMG]?)\s*", re.IGNORECASE)
_STACK_UNITS = {"B": 0, "K": 10, "M": 20, "G": 30}
# How torch's allocator says how much it was asked for.
_ASKED = re.compile(r"tried to allocate (\d+) bytes")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the bytes this process may still take without swapping or meeting a limit."""
    available = _machine_available(proc)
    for folder in _groups(proc, cgroup, "memory"):
        room = _group_room(folder)
        if room is not None:
            available = min(available, room)
    left = address_space_left(proc)
    return available if left is None else min(available, left)


def address_space_left(proc: Path = _PROC) -> int | None:
    """Return the bytes that this process may still map (`ulimit -v`); None without a limit, or off Linux."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = (_read(proc / "self" / "statm") or "").split()
    if limit == resource.RLIM_INFINITY or not words:
        return None
    return max(0, limit - int(words[0]) * resource.getpagesize())


def limit_that_binds(available: int) -> int | None:
    """Return the process's limit on its address space, in bytes, where no more than it leaves is available."""
    left = address_space_left()
    if left is None or left > available:
        return None
    return resource.getrlimit(resource.RLIMIT_AS)[0]


def limit_words(limit: int) -> str:
    """Return a limit on the address space in words, as the shell sets it."""
    return f"the process's limit on address space (RLIMIT_AS, ulimit -v {limit >> 10})"


def thread_bytes(omp_stack: str | None = None) -> int:
    """Return the address space that a new thread takes: its stack, and what the C library adds.

    `omp_stack` is the text of OMP_STACKSIZE for a thread of OpenMP's, which ignores it where it is none.
    """
    asked = _STACK.fullmatch(omp_stack or "")
    if asked is not None:
        stack = int(asked[1]) << _STACK_UNITS[(asked[2] or "K").upper()]
    else:
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        stack = 8 << 20 if stack == resource.RLIM_INFINITY else stack
    return stack + (1 << 20)


def require_room(needed_bytes: int, what: str) -> None:
    """Raise OutOfMemoryError where `ulimit -v` leaves less than what is needed while `what` is done.

    For libraries that end the process, where they are refused memory, instead of saying so.
    """
    left = address_space_left()
    if left is not None and left < needed_bytes:
        raise OutOfMemoryError(
            f"there is no memory while {what}: it may take {needed_bytes >> 20} MiB, and the process's limit "
            f"leaves {left >> 20}. Raise the limit (ulimit -v)"
        )


@contextlib.contextmanager
def refused_memory(what: str) -> Iterator[None]:
    """Raise OutOfMemoryError, naming `what` was done, where the system refuses memory inside.

    Mapped pages, torch, the native kernels, the loader of libraries and threads each say it in an error of
    their own.
    """
    try:
        yield
    except PagemillError:
        raise
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not is_refusal(error):
            raise
        raise OutOfMemoryError(
            f"the system refused memory while {what}: {_what_was_refused(error)}. Raise the process's limit (ulimit -v, "
            "or the container's), free memory, or choose a smaller model, dtype or "
            "kv_cache_memory_bytes"
        ) from error


def _what_was_refused(error: BaseException) -> str:
    """Return what could not be had and what the process's limit leaves, without an allocator's own words."""
    words = str(error)
    asked = _ASKED.search(words)
    if asked is not None:
        text = f"{int(asked[1]) / 2**20:.2f} MiB could not be had"
    elif isinstance(error, ImportError) or "thread" in words:
        text = words  # names the library, or says that it was a thread
    else:
        text = "it could not be had"
    left = address_space_left()
    if left is None:
        return text
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return f"{text}; {limit_words(limit)} leaves {left / 2**20:.2f} MiB"


def num_processors() -> int:
    """Return how many logical processors this process may run on."""
    return len(topology.allowed_numbers()) or os.cpu_count() or 1


def num_threads(omp: str | None, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the compute threads to use; `omp` is the text of OMP_NUM_THREADS, or None."""
    return chosen_threads(omp, proc, cgroup)[0]


def chosen_threads(omp: str | None, proc: Path = _PROC, cgroup: Path = _CGROUP) -> tuple[int, str]:
    """Return the compute threads to use, and why so many, in words.

    Without OMP_NUM_THREADS: the physical cores this process may run on, or the whole cores of a cgroup quota if fewer.
    A core's second thread adds nothing where the first one waits for memory or keeps its multipliers busy.
    """
    if omp is not None and omp.strip():
        first = omp.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            raise ConfigError(
                f"OMP_NUM_THREADS is {omp!r}; it must be a whole number of at least 1"
            )
        return int(first), "OMP_NUM_THREADS"
    cores, reason = num_processors(), "one for each core that this process may use"
    known = topology.allowed_processors()
    if known:
        cores = min(cores, len({processor.core for processor in known}))
    for folder in _groups(proc, cgroup, "cpu"):
        quota = _group_quota(folder)
        if quota is not None and quota < cores:
            cores = max(1, math.floor(quota))
            reason = f"a cgroup allows the time of {quota:.3g} processors"
    return cores, reason


def _machine_available(proc: Path) -> int:
    text = _read(proc / "meminfo")
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux


def _groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents, version 2 or 1.

    In a container the path of /proc/self/cgroup may not exist below the mount; the mount's root is the
    container's own group then, and is yielded in any case.
    """
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
            if not root.exists():
                root = cgroup / controllers
        else:
            continue
        inner = path.strip("/")
        while inner:
            yield root / inner
            inner = inner.rpartition("/")[0]
        yield root


def _group_room(folder: Path) -> int | None:
    """Return the limit less what is in use and cannot be reclaimed, or None without a limit."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    stat = dict(
        line.split() for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line
    )
    prefix = "total_" if "total_inactive_file" in stat else ""
    cached = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    return max(0, limit - max(0, used - cached))


def _group_quota(folder: Path) -> float | None:
    """Return the cores a cgroup may use, or None without a quota."""
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _number(folder / "cpu.cfs_quota_us")
    period = _number(folder / "cpu.cfs_period_us")
    if quota is not None and period and quota > 0:
        return quota / period
    return None


def _number(path: Path) -> int | None:
    """Return the whole number a file holds; None when there is no file or no number in it ("max")."""
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # absent, or another system than Linux
        return None
