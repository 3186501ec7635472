"""Merged streams: everything arrives, an error ends all, leaving closes all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pagemill.errors import EngineDeadError
from pagemill.outputs import RequestOutput
from pagemill.server.streaming import event, merge


class Source:
    """A stream of numbered outputs that notes its end."""

    def __init__(self, name: str, count: int, error: Exception | None = None) -> None:
        self.name = name
        self.count = count
        self.error = error
        self.closed = False

    async def stream(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for i in range(self.count):
                await asyncio.sleep(0)
                yield RequestOutput(f"{self.name}{i}", None, [], None, [], i == self.count - 1)
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0 if self.count < 100 else 60)
        finally:
            self.closed = True


@pytest.mark.parametrize("num_sources", [1, 3])
def test_every_output_arrives_in_the_order_of_its_stream(num_sources: int) -> None:
    async def collect() -> list[tuple[int, str]]:
        sources = [Source(f"s{i}-", 4) for i in range(num_sources)]
        return [(i, o.request_id) async for i, o in merge([s.stream() for s in sources])]

    found = asyncio.run(collect())
    for i in range(num_sources):
        assert [name for j, name in found if j == i] == [f"s{i}-{k}" for k in range(4)]


@pytest.mark.parametrize("others", [0, 2])
def test_error_of_one_stream_is_raised_and_closes_the_others(others: int) -> None:
    bad = Source("bad", 1, EngineDeadError("gone"))
    sources = [bad, *(Source("good", 1000) for _ in range(others))]

    async def consume() -> None:
        async with aclosing(merge([s.stream() for s in sources])) as merged:
            async for _ in merged:
                pass

    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(consume())
    assert all(s.closed for s in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
def test_leaving_early_closes_every_stream(num_sources: int) -> None:
    sources = [Source("s", 1000) for _ in range(num_sources)]

    async def leave() -> None:
        async with aclosing(merge([s.stream() for s in sources])) as merged:
            seen = set()
            async for index, _ in merged:
                seen.add(index)
                if len(seen) == num_sources:
                    break
        assert all(s.closed for s in sources)

    asyncio.run(leave())


def test_event_is_one_line_of_utf8() -> None:
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
