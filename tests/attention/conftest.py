"""One compute thread: these tensors are tiny, and waiting threads would cost more than they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagemill import native


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _native_settings() -> Iterator[None]:
    """Bring back the instruction set and the threads of the native kernels after each test."""
    extension = native.extension()
    if extension is None:
        yield
        return
    isa, threads = extension.active_isa(), extension.num_threads()
    yield
    extension.force_isa(isa)
    extension.set_num_threads(threads)
