"""Real tokenizers, each loaded once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.fast import FastTokenizer

RealTokenizer = Callable[[str], FastTokenizer]


@pytest.fixture(scope="session")
def real_tokenizer(request: pytest.FixtureRequest) -> RealTokenizer:
    """Return a function from a name to a tokenizer: gemma3, qwen3, llama3, or a .gguf's fixture."""
    loaded: dict[str, FastTokenizer] = {}

    def load(name: str) -> FastTokenizer:
        if name not in loaded:
            is_gguf = name.endswith("_gguf")
            path = request.getfixturevalue(name if is_gguf else "packaged_tokenizers")
            tokenizer = load_tokenizer(path if is_gguf else path[name])
            assert isinstance(tokenizer, FastTokenizer)
            loaded[name] = tokenizer
        return loaded[name]

    return load
