"""The bytes of the host tier in a file: one slot a block, each with its name and a checksum.

    header   4096 bytes: magic, length and CRC-32 of a JSON text, that text: what the file belongs to
    record   slot i at 4096 + i * record: an entry of 64 bytes, then the block

    entry    name (16 bytes, zeros: nobody else's), stamp (u64), CRC-32 of the block (u32),
             CRC-32 of what stands before in the entry (u32), zeros

A record is written by one call, and believed only if both sums are right and its stamp is the one that was
written last, or found when the file was opened. So a record that was half written when a process was killed,
or damaged, or cut off, is never taken for a block. Reads and writes are positional calls, not accesses to a
mapping: on a full disk, or in a file that somebody cuts, a mapping ends the process with SIGBUS, a call
returns an error. Both go through the same page cache.

Knows nothing of torch; owned by `batch.block_mover`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError
from pagemill.log import get_logger

logger = get_logger(__name__)

MAGIC = b"pagemill kv tier 1\n"
HEADER_BYTES = 4096
_TEXT = struct.Struct("<II")  # length and CRC-32 of the header's text
_ENTRY = struct.Struct("<16sQI")  # and the entry's own CRC-32
_ENTRY_BYTES = 64
_PAGE = 4096
_NOBODY = bytes(16)
_MOST_PARTS = 512  # of one call; systems allow 1024

Part = Any  # a contiguous buffer: read from, or written into


class TierFile:
    """Slots of `slot_bytes` bytes. Made by `temporary` or `lasting`."""

    def __init__(self, open_file: Callable[[], int], slot_bytes: int, place: str) -> None:
        """`open_file` returns a descriptor and is called on first use, once."""
        self.place = place
        self._open_file = open_file
        self._fd: int | None = None
        self._closing: weakref.finalize[[int], TierFile] | None = None
        self._record_bytes = slot_bytes + self.overhead_bytes(slot_bytes)
        self._stamps: dict[int, int] = {}  # slot -> stamp of the record that is believed
        self._next_stamp = 1
        self.kept: list[tuple[int, bytes]] = []  # (slot, name) found at opening, oldest first

    @staticmethod
    def overhead_bytes(slot_bytes: int) -> int:
        """Return what a slot takes of the file beside its block: an entry, and up to whole pages."""
        return _ENTRY_BYTES + -(_ENTRY_BYTES + slot_bytes) % _PAGE

    # ------------------------------------------------------------ making

    @classmethod
    def temporary(cls, folder: str, slot_bytes: int) -> TierFile:
        """Return a file without a name, which goes with its process; it takes disk as it is filled."""

        def open_file() -> int:
            Path(folder).mkdir(parents=True, exist_ok=True)
            fd, path = tempfile.mkstemp(prefix="swap-", dir=folder)
            os.unlink(path)
            return fd

        return cls(open_file, slot_bytes, f"a temporary file in {folder}")

    @classmethod
    def lasting(
        cls, path: str, slot_bytes: int, num_slots: int, identity: Mapping[str, Any]
    ) -> TierFile:
        """Open or make the file at `path`, and find in `kept` what it holds.

        Raises ConfigError when it belongs to another `identity`, to another engine that runs now, or is
        something else.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"kv_cache_file {path!r} cannot be opened: {error.strerror}; name a file in a folder "
                "that exists and may be written"
            ) from error
        file = cls(lambda: fd, slot_bytes, path)
        try:
            file._descriptor()
            _lock(fd, path)
            _check_header(fd, path, {**identity, "bytes a block": slot_bytes})
            file._find_kept(num_slots)
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Let go of the file; calling it twice is harmless."""
        if self._closing is not None:
            self._closing()
            self._closing = self._fd = None

    # ------------------------------------------------------------ slots

    def write(self, slot: int, name: bytes | None, parts: Sequence[Part]) -> None:
        """Write a block, the `parts` one after the other. Raises OSError, of a full disk for example."""
        # Until all of it is there, nothing in the slot is believed.
        self._stamps.pop(slot, None)
        stamp = self._next_stamp
        self._next_stamp += 1
        entry = _entry(name or _NOBODY, stamp, _checksum(parts))
        _transfer(os.pwritev, self._descriptor(), [entry, *parts], self._offset(slot))
        self._stamps[slot] = stamp

    def read(self, slot: int, parts: Sequence[Part]) -> bool:
        """Read a block into `parts`; return whether it is what was written.

        If not, they hold anything.
        """
        stamp = self._stamps.get(slot)
        if stamp is None:
            return False
        entry = bytearray(_ENTRY_BYTES)
        try:
            _transfer(os.preadv, self._descriptor(), [entry, *parts], self._offset(slot))
        except OSError as error:
            logger.debug("host tier: slot %d of %s cannot be read: %s", slot, self.place, error)
            return False
        read = _parse(bytes(entry))
        if read is None or read[1] != stamp or read[2] != _checksum(parts):
            logger.debug("host tier: slot %d of %s is damaged", slot, self.place)
            return False
        return True

    def forget(self) -> None:
        """Let no block be found by who opens the file next; what was written here is still read."""
        for slot, stamp in self._stamps.items():
            entry = bytearray(_ENTRY_BYTES)
            _transfer(os.preadv, self._descriptor(), [entry], self._offset(slot))
            read = _parse(bytes(entry))
            if read is not None and read[0] != _NOBODY:
                nameless = _entry(_NOBODY, stamp, read[2])
                _transfer(os.pwritev, self._descriptor(), [nameless], self._offset(slot))

    # ------------------------------------------------------------ small parts

    def _descriptor(self) -> int:
        if self._fd is None:
            self._fd = self._open_file()
            # An engine that nobody shuts down leaves neither a lock nor disk space behind.
            self._closing = weakref.finalize(self, os.close, self._fd)
        return self._fd

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._record_bytes

    def _find_kept(self, num_slots: int) -> None:
        fd = self._descriptor()
        size = os.fstat(fd).st_size - HEADER_BYTES
        found = []
        for slot in range(min(num_slots, -(-size // self._record_bytes))):
            read = _parse(os.pread(fd, _ENTRY_BYTES, self._offset(slot)))
            if read is not None:
                name, stamp, _ = read
                self._next_stamp = max(self._next_stamp, stamp + 1)
                if name != _NOBODY:
                    found.append((stamp, slot, name))
        newest = {name: slot for _, slot, name in sorted(found)}
        for stamp, slot, name in sorted(found):
            if newest[name] == slot:
                self._stamps[slot] = stamp
                self.kept.append((slot, name))


def _entry(name: bytes, stamp: int, checksum: int) -> bytes:
    body = _ENTRY.pack(name, stamp, checksum)
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(_ENTRY_BYTES, b"\0")


def _parse(entry: bytes) -> tuple[bytes, int, int] | None:
    """Return (name, stamp, checksum) of an entry that is whole."""
    body, rest = entry[: _ENTRY.size], entry[_ENTRY.size : _ENTRY.size + 4]
    if len(entry) < _ENTRY_BYTES or struct.pack("<I", zlib.crc32(body)) != rest:
        return None
    name, stamp, checksum = _ENTRY.unpack(body)
    return name, stamp, checksum


def _checksum(parts: Sequence[Part]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _transfer(
    call: Callable[[int, Sequence[Part], int], int], fd: int, parts: Sequence[Part], offset: int
) -> None:
    """Read or write all of `parts`; systems may stop in the middle."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        done = call(fd, views[:_MOST_PARTS], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file ends before the block does")
        offset += done
        while views and done >= len(views[0]):
            done -= len(views[0])
            views.pop(0)
        if done:
            views[0] = views[0][done:]


# ---------------------------------------------------------------- header


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"kv_cache_file {path!r} is in use by another engine; give each engine a file of its own"
        ) from error


def _check_header(fd: int, path: str, identity: Mapping[str, Any]) -> None:
    """Compare the file with what this engine would write; an empty one, or one cut in its header, is begun."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConfigError(
            f"kv_cache_file {path!r} is no regular file; name one, or one that is not there"
        )
    header = os.pread(fd, HEADER_BYTES, 0)
    if header and not header.startswith(MAGIC):
        raise ConfigError(
            f"kv_cache_file {path!r} is not a file of pagemill's: it does not begin as one. It is left as it "
            "is; name another, or remove it"
        )
    found = _header_text(header)
    if found is None:
        if header:
            logger.warning("%s has a damaged header; it is begun anew", path)
        _begin(fd, identity)
        return
    wanted = json.loads(json.dumps(dict(identity)))
    for key in {**wanted, **found}:
        if found.get(key) != wanted.get(key):
            raise ConfigError(
                f"kv_cache_file {path!r} belongs to another engine: its {key} is "
                f"{_short(found.get(key))}, this engine's is {_short(wanted.get(key))}. Name another "
                "file, or remove it"
            )


def _header_text(header: bytes) -> dict[str, Any] | None:
    start = len(MAGIC) + _TEXT.size
    if len(header) < start:
        return None
    length, checksum = _TEXT.unpack(header[len(MAGIC) : start])
    text = header[start : start + length]
    if len(text) != length or zlib.crc32(text) != checksum:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _begin(fd: int, identity: Mapping[str, Any]) -> None:
    text = json.dumps(dict(identity)).encode()
    header = MAGIC + _TEXT.pack(len(text), zlib.crc32(text)) + text
    assert len(header) <= HEADER_BYTES, "the identity is a handful of short values"
    os.ftruncate(fd, 0)
    _transfer(os.pwritev, fd, [header.ljust(HEADER_BYTES, b"\0")], 0)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
