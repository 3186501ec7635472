"""pagemill: LLM inference and serving. The public names; heavy imports happen on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagemill.version import __version__

if TYPE_CHECKING:
    from pagemill.beam_search_params import BeamSearchParams
    from pagemill.engine.async_engine import AsyncLLMEngine
    from pagemill.engine.llm_engine import LLMEngine
    from pagemill.engine_args import AsyncEngineArgs, EngineArgs
    from pagemill.inputs import TextPrompt, TokensPrompt
    from pagemill.llm import LLM
    from pagemill.outputs import CompletionOutput, RequestOutput
    from pagemill.sampling_params import RequestOutputKind, SamplingParams

_HOMES = {
    "BeamSearchParams": "pagemill.beam_search_params",
    "LLM": "pagemill.llm",
    "LLMEngine": "pagemill.engine.llm_engine",
    "AsyncLLMEngine": "pagemill.engine.async_engine",
    "EngineArgs": "pagemill.engine_args",
    "AsyncEngineArgs": "pagemill.engine_args",
    "SamplingParams": "pagemill.sampling_params",
    "RequestOutputKind": "pagemill.sampling_params",
    "RequestOutput": "pagemill.outputs",
    "CompletionOutput": "pagemill.outputs",
    "TextPrompt": "pagemill.inputs",
    "TokensPrompt": "pagemill.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagemill' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *globals()])
