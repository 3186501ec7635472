"""Architectures: one short file each, one line here. The key is config.json's `model_type`.

`loader` builds and fills a model; `blocks` holds what the families share. Called by the worker, by the
memory plan and by `engine.resolve` (for `read_shape`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.models.blocks import DecoderLM

MODELS: Registry[type[DecoderLM]] = Registry(
    "model type",
    {
        "llama": "pagemill.models.llama:Llama",
    },
)
