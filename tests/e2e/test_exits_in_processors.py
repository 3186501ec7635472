"""A caller's code that raises what is no `Exception`: the engine ends, and every stream is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagemill import AsyncLLMEngine, EngineArgs, SamplingParams
from pagemill.errors import EngineDeadError
from tests.fakes.fake_model import save_tiny_llama


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_no_stream_waits_for_an_engine_that_has_ended(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")

    def leave(token_ids: list[int], logits: Any) -> Any:
        if len(token_ids) > 3:
            raise raised
        return logits

    async def read(engine: AsyncLLMEngine, name: str, params: SamplingParams) -> None:
        async for _ in engine.generate("abc", params, name):
            pass

    async def scenario() -> list[Any]:
        args = EngineArgs(
            model=str(folder), max_model_len=128, kv_cache_memory_bytes=1 << 20, num_threads=1
        )
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            plain = SamplingParams(max_tokens=100, ignore_eos=True)
            leaving = SamplingParams(max_tokens=100, ignore_eos=True, logits_processors=[leave])
            both = asyncio.gather(
                read(engine, "plain", plain),
                read(engine, "leaving", leaving),
                return_exceptions=True,
            )
            found = await asyncio.wait_for(both, 30)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(read(engine, "later", plain), 30)
            return found
        finally:
            engine.shutdown()

    found = asyncio.run(scenario())
    assert all(isinstance(error, EngineDeadError) for error in found), found
    assert raised.__name__ in str(found[0])
