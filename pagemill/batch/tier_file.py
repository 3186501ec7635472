"""The bytes of the host tier in a file: one slot a block, each with its name and a checksum.

    header   64 KiB: magic, length and CRC-32 of a JSON text, that text: what the file belongs to; in its last
             64 bytes the generation (u64) and its CRC-32 (u32)
    record   slot i at 64 KiB + i * record: an entry of 64 bytes, then the block

    entry    name (16 bytes, zeros: nobody else's), stamp (u64), generation (u64), CRC-32 of the block (u32),
             CRC-32 of what stands before in the entry (u32), zeros

Whoever opens a file finds the names of its generation only. A new generation is one small write, and lets
no name be found any more, in however many slots the file has and whoever opened how many of them.

A record is written by one call, and believed only if both sums are right and its stamp is the one that was
written last, or found when the file was opened. So a record that was half written when a process was killed,
or damaged, or cut off, is never taken for a block. Reads and writes are positional calls, not accesses to a
mapping: on a full disk, or in a file that somebody cuts, a mapping ends the process with SIGBUS, a call
returns an error. Both go through the same page cache.

What else has this file in its hands is told of: who cuts or removes it while it is used finds a warning, and
the header is written again if it went. Knows nothing of torch; owned by `batch.block_mover`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
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

FORMAT = 2
MAGIC = b"pagemill kv tier %d\n" % FORMAT
HEADER_BYTES = 1 << 16
_TEXT = struct.Struct("<II")  # length and CRC-32 of the header's text
_MAGIC_OF_ANY = re.compile(rb"pagemill kv tier (\d{1,9})\n")
_GENERATION = struct.Struct("<QI")  # and its CRC-32
_GENERATION_AT = HEADER_BYTES - 64
_ENTRY = struct.Struct("<16sQQI")  # and the entry's own CRC-32
_ENTRY_BYTES = 64
_PAGE = 4096
_NOBODY = bytes(16)
_MOST_PARTS = 512  # of one call; systems allow 1024
_MOST_NAMED = 3  # differences that a refusal names

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
        self._generation = 0
        self._header: bytes | None = None  # of a file that lasts: magic and text
        self._end = 0  # where the file ends, if nobody else writes to it
        self._is_gone = False  # its name is, and we said so
        self.kept: list[tuple[int, bytes]] = []  # (slot, name) found at opening, oldest first

    @staticmethod
    def overhead_bytes(slot_bytes: int) -> int:
        """Return what a slot takes of the file beside its block: an entry, and up to whole pages."""
        return _ENTRY_BYTES + -(_ENTRY_BYTES + slot_bytes) % _PAGE

    @property
    def lasts(self) -> bool:
        """Return whether it is found again after a restart."""
        return self._header is not None

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
            file._header = _header({**identity, "bytes a block": slot_bytes})
            file._generation = _check_header(fd, path, file._header)
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
        fd = self._descriptor()
        self._mend()
        entry = _entry(name or _NOBODY, stamp, self._generation, _checksum(parts))
        end = _transfer(os.pwritev, fd, [entry, *parts], self._offset(slot))
        self._end = max(self._end, end)
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
            self._tell_of_others()
            return False
        read = _parse(bytes(entry))
        if read is None or read[1] != stamp or read[3] != _checksum(parts):
            logger.debug("host tier: slot %d of %s is damaged", slot, self.place)
            return False
        return True

    def forget(self) -> None:
        """Let no block be found by who opens the file next; what was written here is still read.

        It is on the disk when this returns. Raises OSError.
        """
        if self._header is None:
            return  # nobody opens a temporary file
        fd = self._descriptor()
        self._mend()
        generation = self._generation + 1
        _transfer(os.pwritev, fd, [_generation(generation)], _GENERATION_AT)
        self._generation = generation
        os.fsync(fd)

    # ------------------------------------------------------------ small parts

    def _descriptor(self) -> int:
        if self._fd is None:
            self._fd = self._open_file()
            # An engine that nobody shuts down leaves neither a lock nor disk space behind.
            self._closing = weakref.finalize(self, os.close, self._fd)
        return self._fd

    def _mend(self) -> None:
        """Write the header again if somebody has cut it off; the next start would refuse the file."""
        if self._header is not None and self._tell_of_others() < HEADER_BYTES:
            _begin(self._descriptor(), self._header, self._generation)
            self._end = max(self._end, HEADER_BYTES)

    def _tell_of_others(self) -> int:
        """Return the size of the file; warn if it is shorter than we left it, or has lost its name."""
        found = os.fstat(self._descriptor())
        if self._header is None:
            return found.st_size
        if found.st_size < self._end:
            logger.warning(
                "host tier: %s has %d bytes and had %d: something else has cut it while this engine uses it. "
                "What was cut off is computed again. Give kv_cache_file a name that nothing else writes to",
                self.place,
                found.st_size,
                self._end,
            )
            self._end = found.st_size
        if found.st_nlink == 0 and not self._is_gone:
            self._is_gone = True
            logger.warning(
                "host tier: %s was removed or replaced while this engine uses it: the next start will not "
                "find what this one writes. Restart to begin a new one",
                self.place,
            )
        return found.st_size

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._record_bytes

    def _find_kept(self, num_slots: int) -> None:
        fd = self._descriptor()
        self._end = os.fstat(fd).st_size
        size = self._end - HEADER_BYTES
        found = []
        for slot in range(min(num_slots, -(-size // self._record_bytes))):
            read = _parse(os.pread(fd, _ENTRY_BYTES, self._offset(slot)))
            if read is not None:
                name, stamp, generation, _ = read
                self._next_stamp = max(self._next_stamp, stamp + 1)
                if name != _NOBODY and generation == self._generation:
                    found.append((stamp, slot, name))
        newest = {name: slot for _, slot, name in sorted(found)}
        for stamp, slot, name in sorted(found):
            if newest[name] == slot:
                self._stamps[slot] = stamp
                self.kept.append((slot, name))


def advice(error: OSError) -> str:
    """Return what to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free disk space"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f), or lower swap_space"
    return "See what is wrong with that place"


def _entry(name: bytes, stamp: int, generation: int, checksum: int) -> bytes:
    body = _ENTRY.pack(name, stamp, generation, checksum)
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(_ENTRY_BYTES, b"\0")


def _parse(entry: bytes) -> tuple[bytes, int, int, int] | None:
    """Return (name, stamp, generation, checksum) of an entry that is whole."""
    body, rest = entry[: _ENTRY.size], entry[_ENTRY.size : _ENTRY.size + 4]
    if len(entry) < _ENTRY_BYTES or struct.pack("<I", zlib.crc32(body)) != rest:
        return None
    name, stamp, generation, checksum = _ENTRY.unpack(body)
    return name, stamp, generation, checksum


def _checksum(parts: Sequence[Part]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _transfer(
    call: Callable[[int, Sequence[Part], int], int], fd: int, parts: Sequence[Part], offset: int
) -> int:
    """Read or write all of `parts` and return where they end; systems may stop in the middle."""
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
    return offset


# ---------------------------------------------------------------- header


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"kv_cache_file {path!r} is in use by another engine; give each engine a file of its own"
        ) from error


def _header(identity: Mapping[str, Any]) -> bytes:
    """Return what a file of this identity begins with."""
    text = json.dumps(dict(identity)).encode()
    header = MAGIC + _TEXT.pack(len(text), zlib.crc32(text)) + text
    assert len(header) <= _GENERATION_AT, "an identity is short values, or digests of them"
    return header


def _check_header(fd: int, path: str, wanted: bytes) -> int:
    """Return the file's generation, if it begins as this engine would begin it.

    An empty one, or one cut in its header, is begun.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConfigError(
            f"kv_cache_file {path!r} is no regular file; name one, or one that is not there"
        )
    header = os.pread(fd, HEADER_BYTES, 0)
    begins = _MAGIC_OF_ANY.match(header)
    if header and begins is None:
        raise ConfigError(
            f"kv_cache_file {path!r} is not a file of pagemill's: it does not begin as one. It is left as it "
            "is; name another, or remove it"
        )
    if begins is not None and int(begins[1]) != FORMAT:
        raise ConfigError(
            f"kv_cache_file {path!r} was written by another version of pagemill: its format is "
            f"{int(begins[1])}, this version's is {FORMAT}. Name another file, or remove it"
        )
    text, generation = _header_text(header), _read_generation(header)
    if text is None or generation is None:
        if header:
            logger.warning("%s has a damaged header; it is begun anew", path)
        os.ftruncate(fd, 0)
        _begin(fd, wanted, 1)
        return 1
    differs = _differences(text, _header_text(wanted) or {})
    if differs:
        more = f"; {len(differs) - _MOST_NAMED} more differ" if len(differs) > _MOST_NAMED else ""
        raise ConfigError(
            f"kv_cache_file {path!r} belongs to another engine: {'; '.join(differs[:_MOST_NAMED])}"
            f"{more}. Name another file, or remove it"
        )
    return generation


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], of: str = "") -> list[str]:
    """Return what differs, in words: "its KEY is X, this engine's is Y"."""
    words = []
    for key in {**wanted, **found}:
        one, other = found.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            words += _differences(one, other, f"{of}{key} ")
        elif one != other:
            words.append(f"its {of}{key} is {_short(one)}, this engine's is {_short(other)}")
    return words


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


def _generation(generation: int) -> bytes:
    number = generation.to_bytes(8, "little")
    return _GENERATION.pack(generation, zlib.crc32(number))


def _read_generation(header: bytes) -> int | None:
    written = header[_GENERATION_AT : _GENERATION_AT + _GENERATION.size]
    if len(header) < HEADER_BYTES:
        return None
    generation = int(_GENERATION.unpack(written)[0])
    return generation if written == _generation(generation) else None


def _begin(fd: int, header: bytes, generation: int) -> None:
    whole = header.ljust(_GENERATION_AT, b"\0") + _generation(generation)
    _transfer(os.pwritev, fd, [whole.ljust(HEADER_BYTES, b"\0")], 0)


def _short(value: object) -> str:
    if value is None:
        return "none"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
