"""Files that change while they are read: an error that says how, and never a signal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill.checkpoint.steady_file import SteadyFile
from pagemill.errors import CheckpointError, OutOfMemoryError

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(CONTENT)
    return tmp_path / "weights"


def write_later(path: Path, content: bytes) -> None:
    """Write into the file at a time that differs from the last one even where clocks are coarse."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as stream:
        stream.write(content)
    os.utime(path, ns=(before, before + 1_000_000))


def replace(path: Path) -> None:
    made = path.with_name("new")
    made.write_bytes(CONTENT)
    stat = path.stat()
    os.utime(made, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    made.replace(path)


def test_pieces_are_those_of_the_file(path: Path) -> None:
    file = SteadyFile(path)
    assert file.state.size_bytes == len(CONTENT)
    assert file.read(0, 4) == CONTENT[:4]
    assert file.read(1000, len(CONTENT) - 1000) == CONTENT[1000:]
    assert file.read(len(CONTENT), 0) == b""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 100), r"it had 16384 bytes and has 100"),
        (lambda path: os.truncate(path, 20_000), r"it had 16384 bytes and has 20000"),
        (lambda path: write_later(path, b"other"), "it was written to"),
    ],
)
def test_a_file_that_changed_since_it_was_opened_is_refused(
    path: Path, change: Callable[[Path], None], words: str
) -> None:
    file = SteadyFile(path)
    change(path)
    for offset in (0, 15_000):
        with pytest.raises(CheckpointError, match=rf"weights changed while it was read: {words}"):
            file.read(offset, 50)


def test_another_file_under_the_name_is_refused_where_a_checked_one_is_expected(path: Path) -> None:
    checked = SteadyFile(path)
    replace(path)
    assert checked.read(0, 4) == CONTENT[:4]  # the old one is still whole
    with pytest.raises(CheckpointError, match="another file was put in its place"):
        SteadyFile(path, checked.state)


def test_a_file_that_another_thread_cuts_ends_the_reading_with_an_error(tmp_path: Path) -> None:
    size = 1 << 24
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    file, piece, reading = SteadyFile(path), memoryview(bytearray(1 << 16)), threading.Event()

    def cut() -> None:
        reading.wait()
        for left in (size // 2, 4096, 0):
            os.truncate(path, left)

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(CheckpointError, match=f"it had {size} bytes and has"):
        while True:
            for offset in range(0, size, len(piece)):
                file.read_into(offset, piece)
                reading.set()
    thread.join()


def test_what_cannot_be_opened_or_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read .*gone: No such file"):
        SteadyFile(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="cannot read .*: it is no regular file"):
        SteadyFile(tmp_path)


def test_a_disk_that_fails_and_memory_that_is_refused_are_told_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SteadyFile(path)
    for number, expected in ((5, CheckpointError), (12, OutOfMemoryError)):

        def fail(*args: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(expected, match="weights"):
            file.read(0, 1)


def test_a_file_is_closed_with_its_last_reader(path: Path) -> None:
    def is_open() -> bool:
        links = Path("/proc/self/fd").iterdir()
        return any(os.path.realpath(link) == str(path) for link in links)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files are read from /proc")
    file = SteadyFile(path)
    assert is_open()
    del file
    assert not is_open()
