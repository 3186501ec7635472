"""Servers for the tests of this folder that change nothing in them: one scripted, one real, each started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.fake_model import save_tiny_llama
from tests.server.harness import Running, running_server
from tests.server.real_serve import Serve, ready


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="package")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random model."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="package")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    """Return the real `pagemill serve` with that model."""
    with ready(str(tiny_llama), "--served-model-name", "tiny", "--debug") as running:
        yield running
