"""Memory and cores under cgroup limits of both versions, from made-up /proc and /sys trees."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.device import host
from pagemill.errors import ConfigError, OutOfMemoryError

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Write files below root and return its proc and cgroup folders."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {16 * GIB // 1024} kB\n"}


def test_machine_memory_without_cgroups(tmp_path: Path) -> None:
    assert host.available_bytes(*tree(tmp_path, MACHINE)) == 16 * GIB


def test_tightest_group_of_version_2_counts_less_what_is_used(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "cgroup/pod/box/memory.max": "max\n",
        "cgroup/pod/box/memory.current": f"{GIB}\n",
        "cgroup/pod/memory.max": f"{8 * GIB}\n",
        "cgroup/pod/memory.current": f"{5 * GIB}\n",
        "cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
        "cgroup/memory.stat": "anon 1\n",
    }
    assert host.available_bytes(*tree(tmp_path, MACHINE | files)) == 5 * GIB


def test_container_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/somewhere/on/the/host\n",
        "cgroup/memory.max": f"{2 * GIB}\n",
        "cgroup/memory.current": f"{GIB}\n",
    }
    assert host.available_bytes(*tree(tmp_path, MACHINE | files)) == GIB


def test_version_1_limits_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/box\n3:cpu,cpuacct:/box\n",
        "cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        "cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
        "cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    assert host.available_bytes(*tree(tmp_path, MACHINE | files)) == 3 * GIB


def test_over_its_limit_means_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "cgroup/memory.max": "100\n",
        "cgroup/memory.current": "150\n",
    }
    assert host.available_bytes(*tree(tmp_path, MACHINE | files)) == 0


def test_real_machine_has_memory_and_cores() -> None:
    assert host.available_bytes() > 1 << 20
    assert host.num_threads(None) >= 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
                "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_threads_follow_the_quota(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    affinity = getattr(os, "sched_getaffinity", None)
    everything = len(affinity(0)) if affinity else os.cpu_count()
    assert host.num_threads(None, *tree(tmp_path, MACHINE | files)) == (cores or everything)


@pytest.mark.parametrize(
    ("omp", "quota", "words"),
    [
        ("2", "50000", "OMP_NUM_THREADS"),
        (None, "50000", "a cgroup allows the time of 0.5 processors"),
        (None, "max", "one for each core that this process may use"),
    ],
)
def test_the_number_of_threads_comes_with_its_reason(
    tmp_path: Path, omp: str | None, quota: str, words: str
) -> None:
    files = {"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": f"{quota} 100000\n"}
    assert host.chosen_threads(omp, *tree(tmp_path, MACHINE | files))[1] == words


def test_omp_num_threads_wins() -> None:
    assert host.num_threads("3") == 3
    assert host.num_threads("4,2") == 4
    assert host.num_threads(" ") == host.num_threads(None)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_omp_num_threads_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{text}'"):
        host.num_threads(text)


@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
def test_every_way_to_refuse_memory_is_one_error_of_ours(refusal: Exception) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="while pots were made: .*ulimit -v"),
        host.refused_memory("pots were made"),
    ):
        raise refusal


@pytest.mark.parametrize(
    "other",
    [OSError(errno.ENOENT, "no file"), RuntimeError("shapes differ"), ImportError("no module")],
)
def test_other_errors_pass(other: Exception) -> None:
    with pytest.raises(type(other)) as raised, host.refused_memory("pots were made"):
        raise other
    assert raised.value is other


def test_an_error_of_ours_inside_stays_as_it_is() -> None:
    with pytest.raises(OutOfMemoryError, match="^pans$"), host.refused_memory("pots were made"):
        raise OutOfMemoryError("pans")


def test_an_allocators_own_words_are_not_shown() -> None:
    words = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 3145728 bytes. Error code 12 (Cannot allocate memory)"
    )
    with pytest.raises(OutOfMemoryError) as raised, host.refused_memory("pots were made"):
        raise RuntimeError(words)
    assert "while pots were made: 3.00 MiB could not be had" in str(raised.value)
    assert "enforce" not in str(raised.value) and "Allocator" not in str(raised.value)


LIMITED = """
import resource
from pagemill.device import host
from pagemill.errors import OutOfMemoryError
assert host.address_space_left() is None
host.require_room(1 << 60, "pots were made")
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + (64 << 20),) * 2)
assert host.address_space_left() <= 64 << 20
assert host.available_bytes() <= 64 << 20
host.require_room(32 << 20, "pots were made")
assert host.limit_that_binds(host.available_bytes()) == resource.getrlimit(resource.RLIMIT_AS)[0]
assert host.limit_that_binds(1 << 10) is None
try:
    with host.refused_memory("pans were made"):
        raise MemoryError
except OutOfMemoryError as error:
    print(error)
try:
    host.require_room(65 << 20, "pots were made")
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_a_limit_of_the_process_counts_and_is_named() -> None:
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "no memory while pots were made: it may take 65 MiB" in done.stdout, done.stderr
    assert "memory while pans were made: it could not be had; the process's limit" in done.stdout
    assert re.search(r"RLIMIT_AS, ulimit -v \d+\) leaves \d+", done.stdout)


STACKS = """
import resource
from pathlib import Path
from pagemill.device.cpu import CPUDevice
from pagemill.errors import OutOfMemoryError

device = CPUDevice()
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    device.configure(2)
    print("started")
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is counted on Linux")
@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("4G", "2 compute threads were started: it may take 4097 MiB"),
        (" 4194304 k ", "2 compute threads were started: it may take 4097 MiB"),
        ("4096", "started"),
        ("many", "started"),
    ],
)
def test_stacks_of_compute_threads_are_as_large_as_openmp_was_told(stack: str, words: str) -> None:
    """OpenMP ends the process where it gets no stack."""
    done = subprocess.run(
        [sys.executable, "-c", STACKS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_STACKSIZE": stack},
    )
    assert done.returncode == 0 and words in done.stdout, done.stderr
