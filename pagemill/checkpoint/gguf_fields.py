"""Typed, checked reads of GGUF metadata and of the small tensors that carry settings.

Owns nothing. Called by `gguf_config`, with keys without the architecture's prefix: errors name file,
key, value and range.
"""

from __future__ import annotations

import math
import struct
from array import array
from typing import Any

from pagemill.checkpoint.gguf_reader import GGUFFile
from pagemill.checkpoint.steady_file import SteadyFile
from pagemill.errors import CheckpointError

_MAX_SIZE = 2**31 - 1
_REQUIRED: Any = object()


class Fields:
    """The metadata of one opened file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    def key(self, name: str) -> str:
        """Return the full key of a name of this architecture."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Return whether the file has the key."""
        return self.key(name) in self.file.metadata

    def _error(self, key: str, value: object, wanted: str) -> CheckpointError:
        shown = f"{len(value)} values" if isinstance(value, (list, array)) else repr(value)
        return CheckpointError(f"{self.file.path}: {key} is {shown}; it must be {wanted}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.file.metadata.get(self.key(name), default)
        if value is _REQUIRED:
            raise CheckpointError(
                f"{self.file.path} lacks the metadata {self.key(name)}; convert the model again"
            )
        return value

    def whole(self, name: str, default: int = _REQUIRED, *, minimum: int = 0) -> int:
        """Return a whole number; a list with one value for each block counts if all are equal."""
        value = self._get(name, default)
        if isinstance(value, (array, list)) and len(value) and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or not minimum <= value <= _MAX_SIZE:
            raise self._error(
                self.key(name), value, f"a whole number from {minimum} to {_MAX_SIZE}"
            )
        return value

    def size(self, name: str, default: int = _REQUIRED) -> int:
        """Return a whole number of at least 1."""
        return self.whole(name, default, minimum=1)

    def real(self, name: str, default: float = _REQUIRED, *, minimum: float = 1e-30) -> float:
        """Return a finite number of at least `minimum`, as the shortest decimal of its float32."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not minimum <= value < math.inf:
            raise self._error(self.key(name), value, f"a finite number of {minimum} or more")
        return shortest(float(value))

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._error(self.key(name), value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(self.key(name), value, "a bool")
        return value

    def flags(self, name: str, count: int) -> list[bool] | None:
        """Return a list of `count` bools; None when the key is absent or no list."""
        value = self._get(name, None)
        if not isinstance(value, list):
            return None
        if len(value) != count or not all(isinstance(v, bool) for v in value):
            raise self._error(self.key(name), value, f"{count} bools, one for each block")
        return value

    def number(self, full_key: str) -> float | int | None:
        """Return a finite number under a full key, or None."""
        value = self.file.metadata.get(full_key)
        if value is None:
            return None
        if type(value) is int:
            return value
        if type(value) is not float or not math.isfinite(value):
            raise self._error(full_key, value, "a finite number")
        return shortest(value)

    def of_kind(self, full_key: str, *kinds: type) -> Any:
        """Return the value under a full key, of one of the kinds, or None."""
        value = self.file.metadata.get(full_key)
        if value is not None and not isinstance(value, kinds):
            raise self._error(full_key, value, "a string" if str in kinds else "an array")
        return value

    def token_id(self, full_key: str, vocab_size: int) -> int | None:
        """Return a token id under a full key, or None."""
        value = self.file.metadata.get(full_key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self._error(full_key, value, f"a token id from 0 to {vocab_size - 1}")
        return value

    def rows(self, tensor_name: str) -> int:
        """Return the number of rows of a matrix of the file."""
        tensor = self.file.tensors.get(tensor_name)
        if tensor is None:
            raise CheckpointError(f"{self.file.path} lacks the tensor {tensor_name!r}")
        if len(tensor.shape) != 2:
            raise self._error(f"the shape of {tensor_name}", tensor.shape, "that of a matrix")
        return tensor.shape[0]

    def floats(self, tensor_name: str, count: int) -> list[float] | None:
        """Return the values of a small float32 tensor that carries settings, or None."""
        tensor = self.file.tensors.get(tensor_name)
        if tensor is None:
            return None
        if tensor.type_name != "F32" or tensor.shape != (count,):
            got = f"{tensor.type_name} {tensor.shape}"
            raise self._error(f"tensor {tensor_name}", got, f"F32 ({count},)")
        file = SteadyFile(self.file.path, self.file.state)
        raw = file.read(tensor.offset, tensor.size_bytes)
        values = list(struct.unpack(f"<{count}f", raw))
        if not all(0 < value < math.inf for value in values):
            raise self._error(f"tensor {tensor_name}", values, "finite numbers over 0")
        return [shortest(value) for value in values]


def shortest(value: float) -> float:
    """Return the double with the fewest decimal digits that rounds to the same float32.

    Files store 1e-5 as the float32 next to it; the model's own config has the decimal.
    """
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return value
    if rounded != value:
        return value  # a true double
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        try:
            if struct.unpack("<f", struct.pack("<f", candidate))[0] == value:
                return candidate
        except OverflowError:
            continue
    return value
