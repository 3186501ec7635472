"""Checks of an operator's arguments, with words for what is wrong: the pieces of `operator_rules`.

The kernels get addresses and sizes and must believe them. `Given` is one call's arguments by name; each of
its methods states what an argument must be and raises TypeError (a dtype, a device, a layout in memory) or
ValueError (a size, a number, a name) that says operation, argument, what it is and what it must be. Only
torch's operators pay for this: serving calls the kernels directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
FLOAT32 = (torch.float32,)
INT64 = (torch.int64,)

# How a tensor must lie in memory.
ANY = "any strides"
ROWS = "of contiguous rows that do not overlap"
WHOLE = "contiguous"

Sizes = tuple["int | str", ...]  # a number, or the name of a size that may be anything


class Given:
    """The arguments of one call of an operator."""

    __slots__ = ("operation", "values")

    def __init__(self, operation: str, values: Mapping[str, Any]) -> None:
        self.operation = operation
        self.values = values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def refuse(self, name: str, found: str, wanted: str, kind: type[Exception]) -> NoReturn:
        """Raise the error."""
        raise kind(f"{self.operation}: {name} is {found}; it must be {wanted}")

    def tensor(
        self, name: str, dtypes: Iterable[torch.dtype], sizes: Sizes, layout: str = ANY
    ) -> tuple[int, ...]:
        """Demand a tensor of the CPU with one of the dtypes (any if none), sizes and layout.

        Return its sizes. An argument that is left out passes, and has no sizes.
        """
        tensor = self.values[name]
        if tensor is None:
            return ()
        assert isinstance(tensor, Tensor)
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            found = f"a {tensor.layout} tensor on {tensor.device}"
            self.refuse(name, found, "a strided tensor on cpu", TypeError)
        allowed = tuple(dtypes)
        if allowed and tensor.dtype not in allowed:
            self.refuse(name, str(tensor.dtype), _either(allowed), TypeError)
        shape = tuple(tensor.shape)
        if len(shape) != len(sizes) or any(
            isinstance(size, int) and size != found
            for size, found in zip(sizes, shape, strict=True)
        ):
            wanted = f"of shape [{', '.join(map(str, sizes))}]"
            self.refuse(name, f"of shape {list(shape)}", wanted, ValueError)
        if not _lies(tensor, layout):
            found = f"of shape {list(shape)} with strides {list(tensor.stride())}"
            self.refuse(name, found, layout, TypeError)
        return shape

    def whole(self, name: str, lowest: int, highest: int | None = None) -> int:
        """Demand a whole number in a range, and return it."""
        number: int = self.values[name]
        if number < lowest or (highest is not None and number > highest):
            wanted = f"{lowest} or more" if highest is None else f"from {lowest} to {highest}"
            self.refuse(name, str(number), wanted, ValueError)
        return number

    def choice(self, name: str, options: Iterable[Any]) -> None:
        """Demand one of some names or dtypes."""
        value, allowed = self.values[name], tuple(options)
        if value not in allowed:
            kind = TypeError if isinstance(value, torch.dtype) else ValueError
            self.refuse(name, _quoted(value), _either(allowed), kind)

    def equal(self, name: str, number: int, meaning: str) -> None:
        """Demand one number that other arguments decide; `meaning` says how."""
        if self.values[name] != number:
            self.refuse(name, str(self.values[name]), f"{number}, {meaning}", ValueError)

    def ids(self, name: str, limit: int, *, offset: int = 0, layout: str = ANY) -> int:
        """Demand int64 ids [count] of which each plus offset is from 0 to limit - 1; return the count."""
        (count,) = self.tensor(name, INT64, ("count",), layout)
        self.entries(name, self.values[name], limit, offset=offset)
        return count

    def entries(self, name: str, numbers: Tensor, limit: int, *, offset: int = 0) -> None:
        """Demand that all entries of some whole numbers plus offset are from 0 to limit - 1."""
        if not numbers.numel():
            return
        lowest, highest = (int(bound) for bound in numbers.aminmax())
        if lowest + offset < 0 or highest + offset >= limit:
            if limit <= 0:
                wanted = "empty: there is nothing to choose from"
            else:
                wanted = f"from {-offset} to {limit - 1 - offset}"
            self.refuse(name, f"from {lowest} to {highest}", wanted, ValueError)

    def apart(self, written: str, other: str, *, or_one: bool = False) -> None:
        """Demand that a tensor that is written to shares no memory with another argument.

        A kernel reads its other arguments while it writes: numbers that were looked at would change.
        With `or_one` both may be the very same contiguous numbers.
        """
        one, two = self.values[written], self.values[other]
        if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
            return
        if or_one and one.data_ptr() == two.data_ptr() and one.shape == two.shape:
            return
        if _share_memory(one, two):
            found = f"in the memory of {other}"
            self.refuse(written, found, f"apart from it: {self.operation} writes to it", ValueError)

    def together(self, first: str, second: str) -> None:
        """Demand that two arguments are given or left out together."""
        if (self.values[first] is None) != (self.values[second] is None):
            missing = first if self.values[first] is None else second
            other = second if missing == first else first
            self.refuse(missing, "left out", f"given, as {other} is", ValueError)


def _lies(tensor: Tensor, layout: str) -> bool:
    if layout == WHOLE:
        return tensor.is_contiguous()
    if layout == ROWS and tensor.numel():
        # The kernels know one distance, that of rows; what lies in a row is without gaps.
        whole = tensor[0].is_contiguous() and tensor.stride(-1) == 1
        return whole and (tensor.shape[0] == 1 or tensor.stride(0) >= tensor[0].numel())
    return True


def _share_memory(one: Tensor, two: Tensor) -> bool:
    """Return whether two strided tensors may have a byte in common; columns of one matrix do not."""
    if not one.numel() or not two.numel():
        return False
    (start, stop), (other_start, other_stop) = _extent(one), _extent(two)
    if stop <= other_start or other_stop <= start:
        return False
    return not _side_by_side(one, two)


def _side_by_side(one: Tensor, two: Tensor) -> bool:
    """Return whether the rows of two tensors lie beside each other, at one distance, and never meet."""
    if not one.dim() or not two.dim():
        return False
    distance = one.stride(0) * one.element_size()
    if distance == 0 or distance != two.stride(0) * two.element_size():
        return False
    row_start, row_stop = _extent(one[0])
    other_start, other_stop = _extent(two[0])
    offset = (other_start - row_start) % distance
    return row_stop - row_start <= offset <= distance - (other_stop - other_start)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor that is not empty, and that behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _either(options: Iterable[Any]) -> str:
    return " or ".join(_quoted(option) for option in options)
