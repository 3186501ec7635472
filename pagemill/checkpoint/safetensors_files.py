"""Models as Hugging Face folders: config.json and safetensors files, one or sharded.

Owns the checks of a folder: every header is verified against its file, and shards against the index,
before the first tensor is handed out. Called by `open_checkpoint`.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pagemill.checkpoint.base import Stored, TensorInfo
from pagemill.checkpoint.json_files import parse_json_object, read_json_object
from pagemill.checkpoint.steady_file import FileState, SteadyFile
from pagemill.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


# torch's names of the dtypes; it has none for the others.
_TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    info: TensorInfo
    begin: int  # bytes from the end of the header
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, checked."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]  # where each tensor begins, in bytes from the start of the file
    state: FileState  # in which it was read


class SafetensorsCheckpoint:
    """A checked folder."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.generation_config = read_folder_configs(path)
        self._infos: dict[str, TensorInfo] = {}
        self._headers: dict[Path, Header] = {}
        for file in _weight_files(path):
            self._add_file(file)
        if not self._infos:
            raise CheckpointError(f"the safetensors files of {path} hold no tensor at all")

    def _add_file(self, file: Path) -> None:
        header = read_header(file)
        for name in header.tensors:
            if name in self._infos:
                first = next(f.name for f, one in self._headers.items() if name in one.tensors)
                raise CheckpointError(
                    f"tensor {name!r} is in two files of {self.path}: {first} and {file.name}; "
                    "delete the shards that do not belong to the model"
                )
        self._infos.update(header.tensors)
        self._headers[file] = header

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor by its name, without reading data."""
        return dict(self._infos)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield each tensor once in the file's dtype [info.shape], large matrices as PlainRows.

        Numbers that torch has no dtype for come as the bytes they take.
        """
        import torch

        from pagemill.checkpoint.plain_rows import read_tensor, stored_tensor

        for path, header in self._headers.items():
            file = SteadyFile(path, header.state)
            for name, info in header.tensors.items():
                offset, dtype = header.offsets[name], _TORCH_DTYPES.get(info.dtype)
                if dtype is None:
                    yield name, read_tensor(file, offset, (info.size_bytes,), torch.uint8)
                else:
                    yield name, stored_tensor(file, offset, info.shape, getattr(torch, dtype))


def read_folder_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json ({} when the folder has none)."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no config.json, so it is not a model folder; expected config.json, "
            "*.safetensors and tokenizer files"
        )
    config = read_json_object(file)
    generation = path / "generation_config.json"
    return config, read_json_object(generation) if generation.is_file() else {}


def _weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights of a folder, or refuse it with what to do."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        return _indexed_files(index)
    found = sorted(f for f in path.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if not found:
        raise CheckpointError(_no_weights(path))
    if found == [path / "adapter_model.safetensors"]:
        raise CheckpointError(
            f"{path} holds an adapter (adapter_model.safetensors), not a model; give the folder of "
            "its base model"
        )
    if len(found) == 1 and not _SHARD_NAME.fullmatch(found[0].name):
        return found
    return _numbered_files(path, found)


def _no_weights(path: Path) -> str:
    pickled = sorted(f.name for pattern in _PICKLED for f in path.glob(pattern))
    if pickled:
        return (
            f"{path} holds weights only in formats that can run code when read "
            f"({', '.join(pickled[:4])}); pagemill reads safetensors and GGUF. Convert them: load the "
            "model with transformers and call save_pretrained(folder)"
        )
    return f"{path} has no *.safetensors file; expected {SINGLE_FILE} or {INDEX_FILE} with shards"


def _numbered_files(path: Path, found: list[Path]) -> list[Path]:
    """Check shards that come without an index: one stem, one count, every number there."""
    matches = [_SHARD_NAME.fullmatch(file.name) for file in found]
    series = {(m.group(1), int(m.group(3))) for m in matches if m}
    if None in matches or len(series) != 1:
        names = ", ".join(file.name for file in found[:6])
        raise CheckpointError(
            f"{path} has several safetensors files ({names}) and no {INDEX_FILE} that says which "
            "belong to the model; keep one, or add the index"
        )
    stem, count = series.pop()
    numbers = {int(m.group(2)) for m in matches if m}
    missing = sorted(set(range(1, count + 1)) - numbers) if count <= 99_999 else []
    if missing:
        names = ", ".join(f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in missing[:6])
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {count} shards: {names}; download them again"
        )
    return found


def _indexed_files(index: Path) -> list[Path]:
    """Return the shards an index names, each there and holding the tensors it should hold."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map object from tensor names to files")
    by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] is {file_name!r}; it must name a file in the same folder"
            )
        by_file.setdefault(file_name, []).append(name)
    missing = sorted(f for f in by_file if not (index.parent / f).is_file())
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(by_file)} shards that {INDEX_FILE} names: "
            f"{_some(missing)}; download them again"
        )
    for file_name, names in by_file.items():
        held = read_header(index.parent / file_name).tensors
        absent = sorted(set(names) - held.keys())
        if absent:
            raise CheckpointError(
                f"{index.parent / file_name} lacks {len(absent)} tensors that {INDEX_FILE} says it "
                f"holds: {_some(absent)}; download the shard and the index again"
            )
    return [index.parent / file_name for file_name in sorted(by_file)]


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_header(path: Path) -> Header:
    """Return the tensors of one safetensors file, its header checked against the file's size."""
    file = SteadyFile(path)
    file_size = file.state.size_bytes
    if file_size < 8:
        raise CheckpointError(
            f"{path} has {file_size} bytes and is cut short: no safetensors header; download it again"
        )
    (size,) = struct.unpack("<Q", file.read(0, 8))
    if size > min(file_size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path} is not a whole safetensors file: its header claims {size} bytes, the file "
            f"has {file_size} (limit {MAX_HEADER_BYTES}); download it again"
        )
    raw = file.read(8, size)
    entries = _check_header(
        parse_json_object(raw, f"the header of {path}"), path, file_size - 8 - size
    )
    tensors = {entry.info.name: entry.info for entry in entries}
    offsets = {entry.info.name: 8 + size + entry.begin for entry in entries}
    return Header(tensors, offsets, file.state)


def _check_header(header: dict[str, Any], file: Path, data_size: int) -> list[_Entry]:
    entries = [
        _read_entry(name, entry, file) for name, entry in header.items() if name != "__metadata__"
    ]
    # In file order the byte ranges must follow each other without gap or overlap, to the very end.
    position, before = 0, "the header"
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{file}: tensor {entry.info.name!r} begins at byte {entry.begin}, but {before} ends "
                f"at {position}; the header is damaged, download the file again"
            )
        position, before = entry.end, repr(entry.info.name)
    if position != data_size:
        raise CheckpointError(
            f"{file}: the tensors need {position} bytes, the file holds {data_size}: it is "
            f"{'cut short' if position > data_size else 'too long'}; download it again"
        )
    return entries


def _read_entry(name: str, entry: Any, file: Path) -> _Entry:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has a {type(entry).__name__} for a header entry")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {dtype!r}; known: {', '.join(_DTYPE_BITS)}")
    if not _are_sizes(shape) or len(shape) > 16:
        raise CheckpointError(f"{where} has shape {shape!r}; expected a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}; expected [begin, end]")
    bits = _DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    needed, have = -(-bits // 8), offsets[1] - offsets[0]
    if needed != have:
        raise CheckpointError(
            f"{where}: shape {shape} of {dtype} needs {needed} bytes, data_offsets give {have}"
        )
    return _Entry(TensorInfo(name, tuple(shape), dtype, have), offsets[0], offsets[1])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)
