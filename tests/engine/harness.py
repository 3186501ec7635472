"""Engines over the script executor and the byte tokenizer, for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from pagemill.engine.engine_core import EngineCore
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.stats import StatLogger
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.fakes.script_executor import Script, ScriptExecutor

VOCAB_SIZE = 260
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


def model_config(**changes: Any) -> ModelConfig:
    """Return the configuration of a byte model with a context of 64 tokens."""
    fields: dict[str, Any] = {
        "model": "fake", "path": "fake", "tokenizer": "fake",
        "skip_tokenizer_init": False, "served_model_name": "fake", "load_format": "dummy",
        "model_type": "fake", "hf_config": {}, "generation_config": {}, "dtype": "float32",
        "quantization": None, "max_model_len": MAX_MODEL_LEN, "seed": 0,
        "eos_token_ids": (EOS_ID,), "max_logprobs": 20, "logprobs_mode": "raw_logprobs",
        "logits_processors": (),
        "shape": ModelShape(
            hidden_size=8, intermediate_size=8, num_heads=1, vocab_size=VOCAB_SIZE,
            layers=(LayerShape(num_kv_heads=1, head_dim=8),), max_position=MAX_MODEL_LEN,
        ),
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def engine_config(
    *, max_num_seqs: int = 8, max_num_batched_tokens: int = 32, ahead: bool = False, **model: Any
) -> EngineConfig:
    """Return a whole configuration; invariants are checked after every step."""
    return EngineConfig(
        model=model_config(**model),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            dtype="float32",
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=None,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy="fcfs",
            async_scheduling=ahead,
        ),
        parallel=ParallelConfig(executor="in_process"),
        device=DeviceConfig(device="cpu", num_threads=1),
        observability=ObservabilityConfig(
            log_stats=True, log_stats_interval_s=5.0, metrics_prefix="pagemill", debug=True
        ),
    )


def says(text: str | Sequence[int]) -> Script:
    """Return a script that says the same for every prompt and sample, then ends."""
    tokens = [*text.encode(), EOS_ID] if isinstance(text, str) else list(text)
    return lambda prompt, sample: tokens


def make_engine(
    script: Script,
    *,
    num_blocks: int = 64,
    adds_bos: bool = False,
    stat_loggers: Sequence[StatLogger] = (),
    config: EngineConfig | None = None,
) -> tuple[LLMEngine, ScriptExecutor]:
    """Return an engine whose sequences say what the script says, and its executor."""
    config = config or engine_config()
    executor = make_executor(script, num_blocks, config)
    tokenizer = None if config.model.skip_tokenizer_init else ByteTokenizer(adds_bos=adds_bos)
    return LLMEngine(config, executor, tokenizer, stat_loggers=stat_loggers), executor


def make_executor(script: Script, num_blocks: int, config: EngineConfig) -> ScriptExecutor:
    """Return an executor that plays a script."""
    return ScriptExecutor(
        script,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
    )


def make_core(
    script: Script, *, num_blocks: int = 64, ahead: bool = False
) -> tuple[EngineCore, ScriptExecutor]:
    """Return the core of such an engine, which makes no text, and its executor."""
    config = engine_config(ahead=ahead)
    executor = make_executor(script, num_blocks, config)
    return EngineCore(config, executor, ByteTokenizer(), counts=True), executor


def run(engine: LLMEngine, limit: int = 2000) -> list[RequestOutput]:
    """Step until all requests have ended; return every output in order."""
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            assert_clean(engine)
            return outputs
        outputs += engine.step()
    raise AssertionError(f"requests unfinished after {limit} steps")


def generate(
    engine: LLMEngine, prompt: Any = "p", params: SamplingParams | None = None, **fields: Any
) -> RequestOutput:
    """Run one request alone and return its last output."""
    if params is None:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 32} | fields))
    engine.add_request("one", prompt, params)
    return run(engine)[-1]


def assert_clean(engine: LLMEngine) -> None:
    """Check that nothing is left running, waiting or holding blocks."""
    assert len(engine._outputs) == 0
    assert_core_clean(engine._core)


def assert_core_clean(core: EngineCore) -> None:
    """Check that nothing is left running, waiting or holding blocks."""
    assert core.scheduler.num_unfinished() == 0
    core.scheduler.check_invariants()
    assert core.scheduler.cache_usage() == 0.0
    queues = core.scheduler.queue_sizes()
    assert (queues.running, queues.waiting) == (0, 0)


class StatsList:
    """A stat logger that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def record(self, stats: Any) -> None:
        self.steps.append(stats)

    def total(self, field: Callable[[Any], int]) -> int:
        return sum(field(step) for step in self.steps)
