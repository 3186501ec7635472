"""Which processors compute threads run on: physical cores of this process, on few NUMA nodes.

On one node the system places threads well by itself, and can move one away from a core that another
process takes: nothing is pinned. On several, a thread that moved would read its weights from far away.

Read from Linux's /sys; elsewhere nothing is known and nothing is pinned. Standard library only. Called by
the CPU device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagemill import env
from pagemill.errors import ConfigError

_SYS = Path("/sys/devices/system")
_MAPS = Path("/proc/self/maps")
# Names of OpenMP's libraries: GNU's, LLVM's and Intel's.
_OPENMP = ("libgomp", "libomp", "libiomp")


@dataclass(frozen=True, slots=True)
class Processor:
    """One logical processor."""

    cpu: int  # Linux's number
    core: int  # the lowest processor of the same physical core
    node: int  # NUMA node


def processors(allowed: Iterable[int], system: Path = _SYS) -> tuple[Processor, ...]:
    """Return the processors in `allowed` that the system describes, rising."""
    node_of = {}
    for folder in sorted(system.glob("node/node[0-9]*")):
        for cpu in parse_list(_read(folder / "cpulist")):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    found = []
    for cpu in sorted(allowed):
        siblings = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        if siblings:
            found.append(Processor(cpu, min(parse_list(siblings)), node_of.get(cpu, 0)))
    return tuple(found)


def place(count: int, allowed: tuple[Processor, ...]) -> tuple[int, ...]:
    """Return the processors of `count` threads in order; (): there are too few, pin nothing.

    While there are physical cores for all, no core gets a second thread. Threads are cut evenly over as few nodes as hold
    them, neighbours on one node: a static split of work then keeps a part's memory on its node, since a
    page belongs to the node of the thread that writes it first.
    """
    if count < 1 or count > len(allowed):
        return ()
    by_node: dict[int, list[int]] = {}
    for node in sorted({p.node for p in allowed}):
        here = [p for p in allowed if p.node == node]
        first = {p.core: p.cpu for p in reversed(here)}
        firsts = sorted(first.values())
        by_node[node] = firsts + [p.cpu for p in here if p.cpu not in firsts]
    cores = {node: len({p.core for p in allowed if p.node == node}) for node in by_node}
    # Whole cores while they last, then second threads.
    for room in (cores, {node: len(cpus) for node, cpus in by_node.items()}):
        chosen = _fewest_nodes(count, room)
        if chosen:
            return tuple(cpu for node, share in chosen for cpu in by_node[node][:share])
    return ()


def _fewest_nodes(count: int, room: dict[int, int]) -> list[tuple[int, int]]:
    """Return (node, threads) pairs: as few nodes as hold `count`, as even as their room allows."""
    largest = sorted(room, key=lambda node: (-room[node], node))
    for number in range(1, len(largest) + 1):
        nodes = sorted(largest[:number])
        if sum(room[node] for node in nodes) < count:
            continue
        shares = dict.fromkeys(nodes, 0)
        for _ in range(count):
            free = [node for node in nodes if shares[node] < room[node]]
            shares[min(free, key=lambda node: (shares[node], node))] += 1
        return list(shares.items())
    return []


def homes(count: int, allowed: tuple[Processor, ...]) -> list[list[int]]:
    """Return the processors of each thread where threads are to be pinned; []: they are not.

    Thread 0 is the caller's own, whose children inherit its place: it may also use what its node has
    left over, so that they keep off the cores of the others.
    """
    node_of = {p.cpu: p.node for p in allowed}
    cpus = place(count, allowed)
    if not cpus or len(set(node_of.values())) == 1:
        return []
    taken = {p.core for p in allowed if p.cpu in cpus[1:]}
    own = [p.cpu for p in allowed if p.node == node_of[cpus[0]] and p.core not in taken]
    return [own or [cpus[0]], *([cpu] for cpu in cpus[1:])]


def describe(count: int, allowed: tuple[Processor, ...]) -> str:
    """Return where threads run, for the line at start."""
    nodes = {p.cpu: p.node for p in allowed}
    if len(set(nodes.values())) == 1:
        return "not pinned, on one NUMA node"
    if not homes(count, allowed):
        return "not pinned"
    cpus = place(count, allowed)
    used = sorted({nodes[cpu] for cpu in cpus})
    names = ", ".join(str(node) for node in used)
    where = "NUMA node" if len(used) == 1 else "NUMA nodes"
    return f"pinned to processors {format_list(cpus)} of {where} {names}"


def allowed_processors(system: Path = _SYS) -> tuple[Processor, ...]:
    """Return the processors that this process may run on; () where that is not known."""
    return processors(allowed_numbers(system), system)


def allowed_numbers(system: Path = _SYS) -> frozenset[int]:
    """Return the numbers of the processors that this process may run on; empty where that is not known.

    Where a variable places OpenMP's threads, its library binds the thread that loads it to the first
    place: that thread's processors are fewer than the process's, which are those of all places.
    Raises ConfigError where none of these is a processor of this machine.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    if affinity is None:
        return frozenset()
    places = openmp_places() if env.omp_places_set() else ()
    if not places:
        return frozenset(affinity(0))
    known = {int(folder.name.removeprefix("cpu")) for folder in system.glob("cpu/cpu[0-9]*")}
    placed = {number for place in places for number in place}
    if known and not placed & known:
        raise ConfigError(
            f"OMP_PLACES or GOMP_CPU_AFFINITY places threads on processors {format_list(placed)}; name some "
            f"of this machine's, {format_list(known)}"
        )
    return frozenset(placed & known if known else placed)


def openmp_places(maps: Path = _MAPS) -> tuple[tuple[int, ...], ...]:
    """Return the processors of each place of the process's OpenMP library; () where it has none."""
    paths = {line.split(None, 5)[-1] for line in _read(maps).splitlines() if "/" in line}
    for path in sorted(paths):
        if not Path(path).name.startswith(_OPENMP):
            continue
        library = ctypes.CDLL(path)
        places = []
        for index in range(library.omp_get_num_places()):
            numbers = (ctypes.c_int * library.omp_get_place_num_procs(index))()
            library.omp_get_place_proc_ids(index, numbers)
            places.append(tuple(numbers))
        if places:
            return tuple(places)
    return ()


def parse_list(text: str) -> list[int]:
    """Return the numbers of Linux's lists: "0-2,5" is 0, 1, 2, 5."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def format_list(numbers: Iterable[int]) -> str:
    """Return numbers as Linux writes them; what `parse_list` takes."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
