"""Lazily zeroed memory."""

from __future__ import annotations

import errno
import resource

import pytest
import torch

from pagemill.device.host_memory import lazy_zeros, refused_memory
from pagemill.errors import OutOfMemoryError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_is_zero_writable_and_aligned(dtype: torch.dtype) -> None:
    tensor = lazy_zeros((3, 5, 7), dtype)
    assert tensor.shape == (3, 5, 7) and tensor.dtype == dtype and tensor.is_contiguous()
    assert not tensor.any()
    tensor[1, 2, 3] = 4.0
    assert tensor.sum() == 4.0
    assert tensor.data_ptr() % 64 == 0


def test_no_memory_is_taken_before_the_first_write() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor = lazy_zeros((1 << 28,), torch.float32)
    tensor[:1000] = 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


def test_empty_shape_is_allowed() -> None:
    assert lazy_zeros((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_every_way_to_refuse_memory_is_one_error_of_ours(refusal: Exception) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="while pots were made: .*ulimit -v"),
        refused_memory("pots were made"),
    ):
        raise refusal


@pytest.mark.parametrize("other", [OSError(errno.ENOENT, "no file"), RuntimeError("shapes differ")])
def test_other_errors_pass(other: Exception) -> None:
    with pytest.raises(type(other)) as raised, refused_memory("pots were made"):
        raise other
    assert raised.value is other


def test_large_tensors_begin_at_large_pages_and_are_whole() -> None:
    size = (5 << 20) + 12
    tensor = lazy_zeros((size,), torch.uint8)
    assert tensor.data_ptr() % (1 << 21) == 0
    tensor.fill_(3)
    assert len(tensor) == size and int(tensor.sum(dtype=torch.int64)) == 3 * size
