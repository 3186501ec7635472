"""Attention over the paged cache. A backend is one file here and one line below.

`base` holds the interface; models and the worker import that and `BACKENDS`, never a backend (but for
`worker.replay`, which repeats the native one's calls).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.attention.base import AttentionBackend

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "cpu": "pagemill.attention.cpu:CPUAttention",
        "torch": "pagemill.attention.torch_ref:TorchAttention",
    },
)
