"""What the engine needs of a device. Devices: one file each, registered in `__init__`."""

from __future__ import annotations

from typing import Protocol

import torch


class Device(Protocol):
    """Memory, threads and dtypes of the place where tensors live."""

    name: str
    torch_device: torch.device
    attention_backend: str  # key of the attention registry
    # Whose kernels compute. Key of quant.DENSE_METHODS (the format of weights that are not quantized),
    # of ops.LAYER_OPS (what the other layers use) and of sampling.ROW_MATH.
    dense_weights: str
    default_memory_utilization: float  # share of the available memory to use, 0..1

    def available_bytes(self) -> int:
        """Return the memory this process may still take."""
        ...

    def library_bytes(self, dtype: str) -> int:
        """Return what the device's libraries come to keep for themselves when computing in `dtype`."""
        ...

    def default_num_threads(self) -> tuple[int, str]:
        """Return how many compute threads suit the device's host side, and why so many."""
        ...

    def resolve_dtype(self, requested: str, checkpoint_dtype: str) -> tuple[str, str]:
        """Return the dtype to compute in and the reason; raises ConfigError for one that cannot."""
        ...

    def configure(self, num_threads: int) -> None:
        """Prepare this process for computing."""
        ...

    def thread_places(self, num_threads: int) -> str:
        """Return where `configure` puts compute threads, in words."""
        ...

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        ...
