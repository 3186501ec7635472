"""A server over a real socket, around a real engine whose model says what the prompt tells it to.

A prompt that holds `say:` is answered with what stands behind it (`{i}` becomes the sample's index), then
the end token; every other prompt is answered with dots for ever. The scheduler, the stops, the texts and
the statistics are the real ones; only the executor is scripted.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from pagemill.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LayerShape,
    ModelConfig,
    ModelShape,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine.engine_core import EngineCore
from pagemill.engine.engine_thread import ThreadHome
from pagemill.messages import SchedulerOutput, StepOutput
from pagemill.server.app import build_app
from pagemill.server.listening import listen
from pagemill.server.serving import Serving
from pagemill.server.settings import ServerArgs
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.fakes.script_executor import ScriptExecutor

MODEL = "scripted"
MAX_MODEL_LEN = 512
VOCAB_SIZE = 260
NUM_BLOCKS = 1024
BLOCK_SIZE = 4


def script(prompt: tuple[int, ...], sample: int) -> list[int]:
    """Return what a prompt's text says behind `say:`."""
    text = ByteTokenizer().decode(prompt)
    _, found, said = text.partition("say:")
    if not found:
        return []
    said = said.split("assistant: ")[0].replace("{i}", str(sample))
    return [*ByteTokenizer().encode(said), EOS_ID]


class SlowExecutor(ScriptExecutor):
    """Waits in each step, so that a client can leave in the middle of an answer."""

    delay_s = 0.0

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Play one step after a moment."""
        time.sleep(self.delay_s)
        return super().execute(scheduled)


def engine_config(**model: Any) -> EngineConfig:
    """Return the configuration of the scripted model."""
    shape = ModelShape(
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        vocab_size=VOCAB_SIZE,
        layers=(LayerShape(num_kv_heads=1, head_dim=8),),
        max_position=MAX_MODEL_LEN,
    )
    fields: dict[str, Any] = {
        "model": MODEL, "path": MODEL, "tokenizer": MODEL,
        "skip_tokenizer_init": False, "served_model_name": MODEL, "load_format": "dummy",
        "model_type": "llama", "hf_config": {}, "generation_config": {}, "shape": shape,
        "dtype": "float32", "quantization": None, "max_model_len": MAX_MODEL_LEN, "seed": None,
        "eos_token_ids": (EOS_ID,), "max_logprobs": 20, "logprobs_mode": "raw_logprobs",
        "logits_processors": (),
    }  # fmt: skip
    return EngineConfig(
        model=ModelConfig(**(fields | model)),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            dtype="float32",
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=None,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=64, policy="fcfs"),
        parallel=ParallelConfig(executor="in_process"),
        device=DeviceConfig(device="cpu", num_threads=1),
        observability=ObservabilityConfig(
            log_stats=True, log_stats_interval_s=60.0, metrics_prefix="pagemill", debug=True
        ),
    )


@dataclasses.dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    port: int
    executor: SlowExecutor
    engine: AsyncLLMEngine
    serving: Serving
    http: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send one request of JSON."""
        return self.http.post(path, json=body, **options)

    def get(self, path: str) -> httpx.Response:
        """Get one page."""
        return self.http.get(path)

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream, which must end in [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, summed over the series that have these labels; 0 without one."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            matches = line.startswith((f"pagemill:{name}{{", f"pagemill:{name} "))
            if matches and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_idle(self) -> None:
        """Wait until nothing runs, waits or holds blocks."""
        until(lambda: self.is_idle())

    def is_idle(self) -> bool:
        """Return whether nothing runs, waits or holds blocks."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def make_engine(*, adds_bos: bool = False, **model: Any) -> tuple[AsyncLLMEngine, SlowExecutor]:
    """Return an engine in a thread and its executor."""
    config = engine_config(**model)
    executor = SlowExecutor(
        script, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    )
    tokenizer = None if config.model.skip_tokenizer_init else ByteTokenizer(adds_bos=adds_bos)
    core = EngineCore(config, executor, tokenizer, counts=True)
    return AsyncLLMEngine(ThreadHome(core), tokenizer), executor


@contextmanager
def running_app(serving: Serving) -> Iterator[int]:
    """Run the application behind a real socket; yields the port."""
    bound: socket.socket = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        build_app(serving), lifespan="off", log_config=None, root_path=serving.settings.root_path
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        bound.close()


@contextmanager
def running_server(
    settings: ServerArgs | None = None,
    *,
    adds_bos: bool = False,
    chat_template: str | None = None,
    **model: Any,
) -> Iterator[Running]:
    """Run a server over a scripted engine."""
    engine, executor = make_engine(adds_bos=adds_bos, **model)
    serving = Serving(settings or ServerArgs(), MODEL, chat_template=chat_template)
    serving.attach(engine)
    try:
        with running_app(serving) as port:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=30) as http:
                yield Running(url, port, executor, engine, serving, http)
    finally:
        engine.shutdown()
