"""The engine in a process of its own, with a real (tiny) model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine.engine_process import ProcessHome
from pagemill.engine_args import EngineArgs
from pagemill.errors import CacheTooSmallError, EngineDeadError, RequestError
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes.fake_model import save_tiny_llama


def engine_args(folder: Path, **fields: Any) -> EngineArgs:
    base = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, "num_threads": 1, "seed": 0}
    return EngineArgs(model=str(folder), **(base | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine.from_engine_args(engine_args(folder), home="process")
    yield made
    made.shutdown()


async def collect(engine: AsyncLLMEngine, prompt: Any, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | fields))
    return [output async for output in engine.generate(prompt, params)]


def test_streams_run_side_by_side_and_equal_the_answers_alone(engine: AsyncLLMEngine) -> None:
    async def body() -> None:
        prompts = [f"prompt number {i}" for i in range(30)]
        fields = {"output_kind": RequestOutputKind.DELTA}
        together = await asyncio.gather(*(collect(engine, p, **fields) for p in prompts))
        for prompt, outputs in list(zip(prompts, together, strict=True))[::7]:
            alone = (await collect(engine, prompt))[-1]
            assert alone.prompt == prompt
            assert [t for o in outputs for t in o.outputs[0].token_ids] == alone.outputs[
                0
            ].token_ids
            assert "".join(o.outputs[0].text for o in outputs) == alone.outputs[0].text
            assert all(o.prompt_token_ids == alone.prompt_token_ids for o in outputs)

    asyncio.run(body())


def test_a_stream_that_is_left_frees_its_blocks(engine: AsyncLLMEngine) -> None:
    async def body() -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        async for _ in engine.generate("left", params):
            break
        end = time.monotonic() + 10
        while usage(engine) > 0:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    def usage(engine: AsyncLLMEngine) -> float:
        from pagemill.engine.prometheus import PrometheusStatLogger

        logger = next(s for s in engine.stat_loggers if isinstance(s, PrometheusStatLogger))
        found = {m.name: m.value for m in logger.metrics()}
        return found["pagemill:kv_cache_usage_perc"] + found["pagemill:num_requests_running"]

    asyncio.run(body())


def test_a_function_cannot_cross_to_the_process(engine: AsyncLLMEngine) -> None:
    with pytest.raises(RequestError, match="logits_processors") as caught:
        asyncio.run(collect(engine, "p", logits_processors=[lambda ids, logits: logits]))
    assert caught.value.param == "logits_processors"
    assert asyncio.run(collect(engine, "p"))[-1].finished


def test_what_keeps_the_engine_from_starting_is_raised_here(folder: Path) -> None:
    with pytest.raises(CacheTooSmallError, match="max_model_len"):
        AsyncLLMEngine.from_engine_args(
            engine_args(folder, kv_cache_memory_bytes=10), home="process"
        )


def test_a_killed_engine_ends_every_stream_with_the_reason(folder: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args(engine_args(folder), home="process")
    home = engine._home
    assert isinstance(home, ProcessHome)

    async def body() -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        stream = engine.generate("p", params)
        await anext(stream)
        os.kill(home.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await engine.check_health()

    asyncio.run(body())
    assert engine.errored
    engine.shutdown()
    engine.shutdown()


_PARENT = """
import sys
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine_args import EngineArgs
engine = AsyncLLMEngine.from_engine_args(
    EngineArgs(model=sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20), home="process"
)
print(engine._home.pid, "torch" in sys.modules, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "pass  # and no shutdown()"],
)
def test_a_parent_that_goes_takes_the_engine_with_it(folder: Path, end: str) -> None:
    code = _PARENT.replace("{end}", end)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, timeout=60
    )
    pid, has_torch = done.stdout.split()
    assert has_torch == b"False"
    limit = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie":
        assert time.monotonic() < limit, "the engine process outlives its parent"
        time.sleep(0.05)
