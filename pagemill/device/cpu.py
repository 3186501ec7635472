"""The CPU device: memory and threads of this host, and which dtypes it computes in."""

from __future__ import annotations

import functools

import torch

from pagemill import native
from pagemill.device import host, topology
from pagemill.env import limit_onednn_caches, omp_num_threads, omp_places_set, omp_stack_size
from pagemill.errors import ConfigError

_ALIASES = {"float": "float32", "half": "float16"}
_KNOWN = ("float32", "bfloat16")
# In bfloat16 oneDNN compiles code for every new shape of a product, 0.6 to 0.9 MiB each, and keeps 1024
# of them: a gigabyte. A step needs a few dozen; with 128 kept, a step takes no longer than with 1024.
_KEPT_PRODUCTS = 128
_PRODUCT_BYTES = 3 << 18
# Elements of a thread's part of an operation, from which on torch shares it out.
_PART = 1 << 15


@functools.cache
def _allowed() -> tuple[topology.Processor, ...]:
    """Return the processors of the process as it started: a pinned thread sees fewer."""
    return topology.allowed_processors()


def _start_threads(num_threads: int) -> None:
    """Let OpenMP start its threads now, while there is room: a start that fails later ends the process."""
    torch.zeros(num_threads * _PART, dtype=torch.uint8).add_(1)


class CPUDevice:
    """Tensors in the host's memory."""

    name = "cpu"
    default_memory_utilization = 0.5  # the rest is for everything else on the machine

    def __init__(self) -> None:
        _allowed()
        self.torch_device = torch.device("cpu")
        self._native = native.extension()
        self.attention_backend = "torch" if self._native is None else "cpu"
        self.dense_weights = "torch" if self._native is None else "native"

    def available_bytes(self) -> int:
        """Return the memory this process may still take: the machine's, or less by cgroup limit."""
        return host.available_bytes()

    def library_bytes(self, dtype: str) -> int:
        """Return what the native kernels keep of scratch memory, or oneDNN of compiled products.

        oneDNN's float32 products go elsewhere and keep nothing.
        """
        if self._native is not None:
            # A model's layers are multiplied by one of these.
            own = self._native
            return max(
                int(own.linear_scratch_bytes()),
                int(own.linear_int8_scratch_bytes()),
                int(own.qlinear_scratch_bytes()),
            )
        return _KEPT_PRODUCTS * _PRODUCT_BYTES if dtype == "bfloat16" else 0

    def default_num_threads(self) -> tuple[int, str]:
        """Return OMP_NUM_THREADS if set, else the cores this process may use; and which it was."""
        return host.chosen_threads(omp_num_threads())

    def resolve_dtype(self, requested: str, checkpoint_dtype: str) -> tuple[str, str]:
        """Return (dtype, reason). "auto" takes the checkpoint's, float16 becoming bfloat16."""
        requested = _ALIASES.get(requested, requested)
        if requested == "auto":
            if checkpoint_dtype == "float16":
                return "bfloat16", "the checkpoint is float16, which CPUs do not compute in"
            if checkpoint_dtype in _KNOWN:
                return checkpoint_dtype, "the checkpoint's"
            return "float32", f"the checkpoint's {checkpoint_dtype} is no compute dtype"
        if requested == "float16":
            raise ConfigError(
                "dtype is 'float16', which CPUs do not compute in: use dtype='bfloat16' (same size) "
                "or dtype='float32'"
            )
        if requested not in _KNOWN:
            raise ConfigError(
                f"dtype is {requested!r}; on CPU it must be auto, {' or '.join(_KNOWN)}"
            )
        return requested, "asked for"

    def configure(self, num_threads: int) -> None:
        """Start the compute threads of this process at their places; bound oneDNN's caches.

        Raises OutOfMemoryError where the process's limit leaves no room for their stacks.
        """
        limit_onednn_caches(_KEPT_PRODUCTS)
        stacks = (num_threads - 1) * host.thread_bytes(omp_stack_size())
        host.require_room(stacks, f"{num_threads} compute threads were started")
        torch.set_num_threads(num_threads)
        if self._native is not None:
            self._native.set_num_threads(num_threads)
            pinned = [] if omp_places_set() else topology.homes(num_threads, _allowed())
            self._native.pin_threads(pinned)
        _start_threads(num_threads)

    def thread_places(self, num_threads: int) -> str:
        """Return where the compute threads run, in words."""
        if omp_places_set():
            return "placed by OpenMP's environment variables"
        if self._native is None:
            return "not pinned"
        return topology.describe(num_threads, _allowed())

    def synchronize(self) -> None:
        """Do nothing: work on the CPU is done when the call returns."""
