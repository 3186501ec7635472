"""The peak of a computation's temporary memory, counted by hand.

Live storages of tensors that were made inside the block are added up after every operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode


class PeakMemory(TorchFunctionMode):
    """Counts bytes of the tensors made inside the `with` block; `peak_bytes` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes: int = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it made."""
        self._forget()
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            storage = tensor.untyped_storage()
            # A view or an in-place result brings no new storage.
            if storage._cdata not in self._live and storage._cdata not in given:
                ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = (ref, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result

    def _forget(self) -> None:
        for key, (ref, _) in list(self._live.items()):
            if ref.expired():  # type: ignore[no-untyped-call]
                del self._live[key]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found
