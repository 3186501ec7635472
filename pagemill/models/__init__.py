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
        "gemma2": "pagemill.models.gemma2:Gemma2",
        "gemma3": "pagemill.models.gemma3:Gemma3",
        "gemma3_text": "pagemill.models.gemma3:Gemma3",
        "gpt2": "pagemill.models.gpt2:GPT2",
        "gpt_neox": "pagemill.models.gpt_neox:GPTNeoX",
        "llama": "pagemill.models.llama:Llama",
        "mistral": "pagemill.models.mistral:Mistral",
        "opt": "pagemill.models.opt:OPT",
        "phi3": "pagemill.models.phi3:Phi3",
        "qwen2": "pagemill.models.qwen2:Qwen2",
        "qwen3": "pagemill.models.qwen3:Qwen3",
    },
)
