"""The GGUF container: header, metadata and where each tensor lies. Standard library only.

Whoever made the file is not trusted: every count, length, type and offset is compared with the file's
size before it is used, and every error is a CheckpointError with file, field and numbers. Owns nothing
after a call; no tensor data is read. Called by the GGUF checkpoint and by the tokenizer room.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian)
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pagemill.checkpoint.steady_file import FileState, SteadyFile
from pagemill.errors import CheckpointError

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
# Strings and nested lists in arrays, all together: several times the largest vocabulary with its
# merges, and a bound on what a small file can make us hold.
MAX_ARRAY_OBJECTS = 1 << 22
MAX_ARRAY_DEPTH = 4
MAX_ENTRIES = 1 << 20  # metadata entries, and tensors
MAX_HEADER_BYTES = 1 << 30  # everything before the tensor data
_FIRST_READ_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value types of fixed size: the struct letter is also the letter of `array`.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# Tensor types: id -> (name, elements of a block, bytes of a block). Those that cannot be dequantized are
# here as well, so that they are refused by their names.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip

# Types whose elements are plain numbers, with their bytes.
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file. `shape` is row-major: the format's own order turned around."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # bytes from the start of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a file says of itself, checked."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    state: FileState  # in which it was read


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a .gguf file by key.

    Numbers, bools and strings are Python's own; arrays of numbers are `array.array`, arrays of strings,
    bools or arrays are lists.
    """
    return _read(Path(path), lambda cursor: _parse_metadata(cursor, _parse_start(cursor)[2]))


def read_gguf(path: str | Path) -> GGUFFile:
    """Return metadata and tensor places of a .gguf file, everything checked against its size."""
    path = Path(path)
    return _read(path, lambda cursor: _parse(cursor, path))


def _read(path: Path, parse: Callable[[_Cursor], T]) -> T:
    file = SteadyFile(path)
    size = file.state.size_bytes
    if size < 24:
        raise CheckpointError(f"{path} has {size} bytes; that is no GGUF file")
    return parse(_Cursor(file))


class _Cursor:
    """A position in the file that cannot leave it, nor the part that a header may take.

    `data` is the file's beginning, as far as it was needed.
    """

    def __init__(self, file: SteadyFile) -> None:
        self.file, self.path, self.size = file, file.path, file.state.size_bytes
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.data = b""
        self.position = 0
        self.objects_left = MAX_ARRAY_OBJECTS

    def reach(self, stop: int) -> bytes:
        """Read on, to `stop` or the end, whichever comes first; return all that was read."""
        have = len(self.data)
        if have < min(stop, self.end):
            # At least as much again, so that a long header is copied only a few times.
            wanted = min(max(stop, 2 * have, _FIRST_READ_BYTES), self.end)
            self.data += self.file.read(have, wanted - have)
        return self.data

    def fail(self, field: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {field} {problem}; the file is damaged or no valid GGUF"
        )

    def need(self, count: int, field: str) -> None:
        """Check that `count` bytes are left, and read them."""
        left = self.end - self.position
        if count > left:
            raise self.fail(
                field, f"needs {count} bytes at offset {self.position}, but {left} are left"
            )
        self.reach(self.position + count)

    def number(self, letter: str, field: str) -> Any:
        size = struct.calcsize("<" + letter)
        self.need(size, field)
        (value,) = struct.unpack_from("<" + letter, self.data, self.position)
        self.position += size
        return value

    def string(self, field: str) -> str:
        size = self.number("Q", field)
        self.need(size, field)
        raw = self.data[self.position : self.position + size]
        self.position += size
        return self.decoded(raw, field)

    def decoded(self, raw: bytes, field: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            shown = raw[max(0, error.start - 8) : error.start + 8]
            raise self.fail(field, f"is not UTF-8 text near {shown!r}") from error

    def count(self, field: str, smallest: int) -> int:
        """Read a count of items that take at least `smallest` bytes each."""
        count: int = self.number("Q", field)
        left = self.end - self.position
        if count * smallest > left:
            raise self.fail(
                field,
                f"is {count}, which takes {count * smallest} bytes or more, but {left} are left",
            )
        return count


def _parse_start(cursor: _Cursor) -> tuple[int, int, int]:
    """Return (version, tensor count, metadata count) of the header."""
    magic = cursor.reach(24)[:4]
    if magic != MAGIC:
        raise CheckpointError(
            f"{cursor.path} begins with {magic!r}, not {MAGIC!r}: it is no GGUF file"
        )
    cursor.position = 4
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{cursor.path} is a big-endian GGUF file; pagemill reads little-endian ones. Convert "
                "it with gguf-convert-endian of the gguf package"
            )
        raise CheckpointError(
            f"{cursor.path} is a GGUF file of version {version}; pagemill reads versions 2 and 3. "
            "Convert the model again with a current converter"
        )
    # A tensor takes a name, its dimensions, a type and an offset; an entry a key, a type and a value.
    tensors = cursor.count("tensor count", 8 + 4 + 4 + 8)
    entries = cursor.count("metadata count", 8 + 4 + 1)
    for field, count in (("tensor count", tensors), ("metadata count", entries)):
        if count > MAX_ENTRIES:
            raise cursor.fail(field, f"is {count}; at most {MAX_ENTRIES} are read")
    return version, tensors, entries


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"key of metadata entry {index}")
        field = f"metadata {key!r}"
        if key in metadata:
            raise cursor.fail(field, "is there twice")
        metadata[key] = _parse_value(cursor, cursor.number("I", field), field, 0)
    return metadata


def _parse_value(cursor: _Cursor, kind: int, field: str, depth: int) -> Any:
    if kind == _STRING:
        return cursor.string(field)
    if kind == _ARRAY:
        return _parse_array(cursor, field, depth + 1)
    letter = _NUMBERS.get(kind)
    if letter is None:
        raise cursor.fail(field, f"has value type {kind}; the types are 0 to 12")
    value = cursor.number(letter, field)
    return _as_bools(cursor, [value], field)[0] if kind == _BOOL else value


def _parse_array(cursor: _Cursor, field: str, depth: int) -> Any:
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.fail(field, f"nests arrays deeper than {MAX_ARRAY_DEPTH}")
    kind = cursor.number("I", field)
    letter = _NUMBERS.get(kind)
    if letter is not None:
        size = struct.calcsize("<" + letter)
        count = cursor.count(f"{field}, its length,", size)
        cursor.need(count * size, field)
        numbers = array(letter)
        numbers.frombytes(cursor.data[cursor.position : cursor.position + count * size])
        if sys.byteorder == "big":
            numbers.byteswap()
        cursor.position += count * size
        if kind != _BOOL:
            return numbers
        _spend(cursor, count, field)
        return _as_bools(cursor, numbers, field)
    if kind not in (_STRING, _ARRAY):
        raise cursor.fail(field, f"has elements of type {kind}; the types are 0 to 12")
    count = cursor.count(f"{field}, its length,", 8 if kind == _STRING else 12)
    _spend(cursor, count, field)
    if kind == _STRING:
        return _parse_strings(cursor, count, field)
    return [_parse_array(cursor, field, depth + 1) for _ in range(count)]


def _spend(cursor: _Cursor, count: int, field: str) -> None:
    cursor.objects_left -= count
    if cursor.objects_left < 0:
        raise cursor.fail(
            field, f"has {count} elements, and arrays over {MAX_ARRAY_OBJECTS} together are refused"
        )


def _as_bools(cursor: _Cursor, values: Any, field: str) -> list[bool]:
    for value in values:
        if value > 1:
            raise cursor.fail(field, f"is a bool with the value {value}")
    return [value == 1 for value in values]


def _parse_strings(cursor: _Cursor, count: int, field: str) -> list[str]:
    # A vocabulary has hundreds of thousands of these: no method call for each.
    data, position = cursor.data, cursor.position
    length_of = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    for index in range(count):
        start = position + 8
        if start > len(data):
            data = cursor.reach(start)
        stop = start + length_of(data, position)[0] if start <= len(data) else start
        if len(data) < stop <= cursor.end:
            data = cursor.reach(stop)
        if stop > len(data):
            cursor.position = min(position, cursor.end)
            raise cursor.fail(
                f"{field}, string {index} of {count},", "runs over the end of the file"
            )
        raw = data[start:stop]
        position = stop
        try:
            strings.append(str(raw, "utf-8"))
        except UnicodeDecodeError:
            cursor.decoded(raw, f"{field}, string {index} of {count},")
    cursor.position = position
    return strings


def _parse(cursor: _Cursor, path: Path) -> GGUFFile:
    version, num_tensors, num_entries = _parse_start(cursor)
    metadata = _parse_metadata(cursor, num_entries)
    splits = metadata.get("split.count", 1)
    if isinstance(splits, int) and splits > 1:
        raise CheckpointError(
            f"{path} is one of {splits} pieces of a split model; merge them first: "
            "llama-gguf-split --merge FIRST_PIECE OUTPUT"
        )
    tensors = [_parse_tensor(cursor, index) for index in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(
            "metadata 'general.alignment'",
            f"is {alignment!r}; it must be a power of two up to 2^20",
        )
    data_start = -(-cursor.position // alignment) * alignment
    return GGUFFile(
        path, version, metadata, _place(cursor, tensors, data_start, alignment), cursor.file.state
    )


def _parse_tensor(cursor: _Cursor, index: int) -> GGUFTensor:
    """Read one description; its offset is still relative to the data section."""
    name = cursor.string(f"name of tensor {index}")
    field = f"tensor {name!r}"
    num_dims = cursor.number("I", field)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(field, f"has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = [cursor.number("Q", field) for _ in range(num_dims)]
    kind = cursor.number("I", field)
    offset = cursor.number("Q", field)
    if kind not in TENSOR_TYPES:
        raise cursor.fail(field, f"has the tensor type {kind}, which is unknown or withdrawn")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if 0 in dims or dims[0] % block:
        raise cursor.fail(
            field, f"has dimensions {dims}; {type_name} needs positive ones, the first by {block}"
        )
    size = dims[0] // block * block_bytes
    for dim in dims[1:]:
        size *= dim
    return GGUFTensor(name, tuple(reversed(dims)), type_name, offset, size)


def _place(
    cursor: _Cursor, tensors: list[GGUFTensor], data_start: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Check that the tensors lie in the file, aligned and apart; make their offsets absolute."""
    placed: dict[str, GGUFTensor] = {}
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        field = f"tensor {tensor.name!r}"
        if tensor.name in placed:
            raise cursor.fail(field, "is there twice")
        if tensor.offset % alignment:
            raise cursor.fail(
                field, f"begins at offset {tensor.offset}, not a multiple of {alignment}"
            )
        if tensor.offset < end:
            raise cursor.fail(field, f"at offset {tensor.offset} overlaps {before!r}, up to {end}")
        end, before = tensor.offset + tensor.size_bytes, tensor.name
        if data_start + end > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: {field} needs the bytes {data_start + tensor.offset} to "
                f"{data_start + end}, but the file ends at {cursor.size}: it is cut short; download "
                "it again"
            )
        placed[tensor.name] = GGUFTensor(
            tensor.name,
            tensor.shape,
            tensor.type_name,
            data_start + tensor.offset,
            tensor.size_bytes,
        )
    return {tensor.name: placed[tensor.name] for tensor in tensors}
