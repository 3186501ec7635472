"""Lazily zeroed memory."""

from __future__ import annotations

import resource

import pytest
import torch

from pagemill.device.host_memory import lazy_zeros


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


def test_large_tensors_begin_at_large_pages_and_are_whole() -> None:
    size = (5 << 20) + 12
    tensor = lazy_zeros((size,), torch.uint8)
    assert tensor.data_ptr() % (1 << 21) == 0
    tensor.fill_(3)
    assert len(tensor) == size and int(tensor.sum(dtype=torch.int64)) == 3 * size
