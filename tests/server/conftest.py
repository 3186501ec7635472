"""One scripted server for the tests of this folder that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import Running, running_server


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
