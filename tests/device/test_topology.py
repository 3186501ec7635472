"""Where threads go on machines that are drawn in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill import native
from pagemill.device import topology
from pagemill.device.topology import Processor, place, processors
from pagemill.errors import ConfigError


def draw_machine(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, cpus in nodes.items():
        folder = root / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu, threads in siblings.items():
        folder = root / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(threads + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Return two nodes of four cores with two threads each: 0-3 and 8-11, 4-7 and 12-15."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    return draw_machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings)


def test_a_machine_is_read_from_its_folder(two_sockets: Path) -> None:
    found = processors(range(16), two_sockets)
    assert found[9] == Processor(cpu=9, core=1, node=0)
    assert found[12] == Processor(cpu=12, core=4, node=1)
    assert [p.cpu for p in processors([3, 5, 40], two_sockets)] == [3, 5]


def test_a_system_that_describes_nothing_pins_nothing(tmp_path: Path) -> None:
    assert processors(range(4), tmp_path) == ()
    assert place(2, ()) == ()


@pytest.mark.parametrize(
    ("count", "cpus"),
    [
        (1, (0,)),
        (4, (0, 1, 2, 3)),  # one node holds them
        (6, (0, 1, 2, 4, 5, 6)),  # half on each
        (8, (0, 1, 2, 3, 4, 5, 6, 7)),  # every core once
        (10, (0, 1, 2, 3, 8, 4, 5, 6, 7, 12)),  # then second threads
        (16, (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)),
        (17, ()),
    ],
)
def test_threads_take_whole_cores_on_few_nodes(
    two_sockets: Path, count: int, cpus: tuple[int, ...]
) -> None:
    assert place(count, processors(range(16), two_sockets)) == cpus


def test_only_processors_that_the_process_may_use_are_taken(two_sockets: Path) -> None:
    allowed = processors([1, 9, 5, 6], two_sockets)
    assert place(2, allowed) == (5, 6)  # two cores of one node before two threads of one core
    assert place(3, allowed) == (1, 5, 6)
    assert place(4, allowed) == (1, 9, 5, 6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=20),
    st.integers(1, 20),
)
def test_every_thread_has_a_processor_of_its_own(
    machine: list[tuple[int, int]], count: int
) -> None:
    # A core lies on one node: its number names both.
    allowed = tuple(
        Processor(cpu, core * 3 + node, node) for cpu, (core, node) in enumerate(machine)
    )
    cpus = place(count, allowed)
    assert len(set(cpus)) == len(cpus) == (count if count <= len(allowed) else 0)
    assert set(cpus) <= {p.cpu for p in allowed}
    cores = {p.core for p in allowed if p.cpu in cpus}
    if cpus and count <= len({p.core for p in allowed}):
        assert len(cores) == count  # no core has two threads while another has none


def test_threads_are_pinned_only_where_there_are_several_nodes(two_sockets: Path) -> None:
    both, one = processors(range(16), two_sockets), processors([0, 1, 2, 3], two_sockets)
    assert topology.homes(3, one) == []
    assert topology.homes(17, both) == []
    # The caller's thread has what the others of its node leave: core 0 and core 3, both threads.
    assert topology.homes(3, both) == [[0, 3, 8, 11], [1], [2]]
    assert topology.homes(8, both)[0] == [0, 8]


def test_the_line_at_start_says_where_threads_run(two_sockets: Path) -> None:
    allowed = processors(range(16), two_sockets)
    say = topology.describe
    assert say(6, allowed) == "pinned to processors 0-2,4-6 of NUMA nodes 0, 1"
    assert say(3, allowed) == "pinned to processors 0-2 of NUMA node 0"
    assert say(40, allowed) == say(1, ()) == "not pinned"
    assert say(2, processors([0, 1], two_sockets)) == "not pinned, on one NUMA node"


PINNING = """
import os, sys
import torch
from pagemill import native
from pagemill.ops import cpu_layers

module = native.required()
cpus = sorted(os.sched_getaffinity(0))[:2]
module.set_num_threads(2)
module.pin_threads([cpus, cpus[1:]])
cpu_layers.soft_cap(torch.ones(1 << 16), 1.0)
threads = [int(name) for name in os.listdir("/proc/self/task")]
places = sorted(tuple(sorted(os.sched_getaffinity(thread))) for thread in threads)
sys.exit(0 if (cpus[1],) in places and tuple(cpus) in places else str(places))
"""


@pytest.mark.skipif(
    len(topology.allowed_processors()) < 2, reason="two processors are needed to tell them apart"
)
@pytest.mark.skipif(native.extension() is None, reason="pagemill._C is not built: run `make build`")
def test_a_region_sends_its_threads_to_their_places() -> None:
    done = subprocess.run([sys.executable, "-c", PINNING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PLACED = """
import torch
from pagemill.device import host, topology
from pagemill.errors import ConfigError

try:
    print(topology.format_list(topology.allowed_numbers()), host.num_processors())
except ConfigError as error:
    print(error)
"""


def placed(**variables: str) -> str:
    """Return what a process that OpenMP's variables place says of its processors, torch imported first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PLACED], capture_output=True, text=True, env=kept | variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    len(topology.allowed_numbers()) < 2, reason="two processors are needed to tell them apart"
)
@pytest.mark.skipif(sys.platform != "linux", reason="libraries are listed on Linux")
def test_a_thread_that_openmp_placed_speaks_for_all_places_of_the_process() -> None:
    numbers = sorted(topology.allowed_numbers())
    everywhere = f"{topology.format_list(numbers)} {len(numbers)}"
    assert placed() == placed(OMP_PROC_BIND="true") == everywhere
    assert placed(OMP_PLACES="cores", OMP_PROC_BIND="close") == everywhere
    assert placed(OMP_PLACES=f"{{{numbers[1]}}}") == f"{numbers[1]} 1"


@pytest.mark.skipif(not topology.allowed_numbers(), reason="processors are known on Linux")
def test_places_of_which_the_machine_has_none_are_refused(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "90 1 91")
    monkeypatch.setattr(topology, "openmp_places", lambda: ((90,), (1,), (91,)))
    assert topology.allowed_numbers(two_sockets) == {1}
    monkeypatch.setattr(topology, "openmp_places", lambda: ((90,), (91,)))
    with pytest.raises(ConfigError, match="on processors 90-91; name some of this .*, 0-15"):
        topology.allowed_numbers(two_sockets)


def test_lists_are_read_as_they_are_written() -> None:
    assert topology.parse_list("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]
    assert topology.parse_list("") == []
    assert topology.format_list([8, 0, 2, 1, 7, 5]) == "0-2,5,7-8"
