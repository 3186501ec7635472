"""Logits of many rows: the same memory step after step, and never that of one who is still there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.ops import kept_results
from pagemill.ops.kept_results import KeptResults

FLOATS = kept_results.LEAST_BYTES // 4
COLUMNS = 1024
ROWS = FLOATS // COLUMNS


@pytest.fixture
def results() -> KeptResults:
    return KeptResults()


def test_the_next_result_has_the_memory_of_the_last_one(results: KeptResults) -> None:
    first = results.empty(ROWS + 1, COLUMNS, torch.float32)
    address = first.data_ptr()
    first.fill_(1.0)
    del first
    for rows in (ROWS, ROWS + 1, 2 * ROWS):  # there is room for a batch that grows
        assert results.empty(rows, COLUMNS, torch.float32).data_ptr() == address


def test_memory_that_anyone_looks_at_is_not_given_again(results: KeptResults) -> None:
    first = results.empty(ROWS, COLUMNS, torch.float32)
    first.fill_(1.0)
    row, array = first[3], first.numpy()
    del first
    results.empty(ROWS, COLUMNS, torch.float32).fill_(2.0)
    assert float(row.sum()) == COLUMNS
    del row
    results.empty(ROWS, COLUMNS, torch.float32).fill_(2.0)
    assert np.all(array == 1.0)


def test_a_larger_result_gets_larger_memory(results: KeptResults) -> None:
    results.empty(ROWS, COLUMNS, torch.float32)
    large = results.empty(5 * ROWS, COLUMNS, torch.float32)
    assert large.shape == (5 * ROWS, COLUMNS)
    assert float(large.fill_(1.0).sum(dtype=torch.float64)) == large.numel()


def test_small_results_are_torchs_own(results: KeptResults) -> None:
    first = results.empty(ROWS - 1, COLUMNS, torch.float32)
    second = results.empty(ROWS - 1, COLUMNS, torch.float32)
    assert first.data_ptr() != second.data_ptr()


def test_a_mode_gives_the_memory_itself(results: KeptResults) -> None:
    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += func is torch.ops.aten.empty.memory_format
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        results.empty(ROWS, COLUMNS, torch.float32)
    assert mode.seen == 1


def test_what_stays_is_what_the_plan_counts() -> None:
    assert kept_results.kept_bytes(ROWS - 1, COLUMNS) == 0
    assert kept_results.kept_bytes(ROWS, COLUMNS) == kept_results.LEAST_BYTES
    assert kept_results.kept_bytes(ROWS + 1, COLUMNS) == 2 * kept_results.LEAST_BYTES
